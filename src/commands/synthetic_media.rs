//! Media for benchmarks and profiles: grey pictures, as patches that a tower reads.

use anyhow::{Result, bail, ensure};
use gemma4c_plan::cuda::Phase;
use gemma4c_plan::{Medium, Plan};
use gemma4c_runtime::{Patches, RuntimeError, Session, Soft};

/// What a tower reads.
pub struct Media {
    tower: usize,
    values: Vec<f32>,
    columns: u32,
    rows: u32,
}

impl Media {
    /// A grey picture of so many soft tokens, as near to a square as their number allows.
    pub fn picture(plan: &Plan, soft: u32) -> Result<Media> {
        let tower = plan.towers.iter().position(|tower| tower.name == "vision").ok_or(RuntimeError::NoTower)?;
        let of = &plan.towers[tower];
        let room = of.program.asked;
        ensure!(
            (1..=room).contains(&soft),
            "--image {soft}: the plan has room for pictures of 1 to {room} soft tokens; compile it with more --image-tokens"
        );
        let high = (1..=soft.isqrt()).rev().find(|high| soft.is_multiple_of(*high)).unwrap_or(1);
        let Medium::Picture { pool, .. } = of.medium else { bail!(RuntimeError::NoTower) };
        let (columns, rows) = (soft / high * pool, high * pool);
        let values = vec![0.5; (columns * rows * of.medium.row_width()) as usize];
        Ok(Media { tower, values, columns, rows })
    }

    /// As much as a phase of a tower takes.
    pub fn of(plan: &Plan, tower: usize, phase: &Phase) -> Result<Media> {
        match plan.towers[tower].medium {
            Medium::Picture { pool, .. } => Media::picture(plan, phase.rows / (pool * pool)),
            medium => bail!("no phase of a {medium:?} is timed"),
        }
    }

    pub fn read(&self, session: &mut Session) -> Result<Soft> {
        let patches = Patches { values: &self.values, columns: self.columns, rows: self.rows };
        Ok(session.soft_tokens(self.tower, patches)?)
    }
}
