//! Media for benchmarks and profiles: grey pictures, as patches that a tower reads, and a rising tone, as samples.

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::media::{self, Frames};
use gemma4c_plan::cuda::Phase;
use gemma4c_plan::{Medium, Plan};
use gemma4c_runtime::{Patches, RuntimeError, Session, Soft};

/// More samples than any soft token is made of.
const SAMPLES_OF_SOFT: usize = 640;

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
            _ => Media::frames_of(plan, tower, &vec![0.0; SAMPLES_OF_SOFT * phase.rows as usize], Some(phase.rows)),
        }
    }

    /// Samples of a rising tone, for so many seconds.
    pub fn tone(seconds: u32) -> Vec<f32> {
        let sample = |n: u32| (f64::from(n) * f64::from(n) * 1e-6).sin() as f32 * 0.5;
        (0..seconds * media::RATE).map(sample).collect()
    }

    /// The frames of a sound, for the plan's tower that reads sound.
    pub fn sound(plan: &Plan, samples: &[f32]) -> Result<Media> {
        let tower = plan.towers.iter().position(|tower| !tower.medium.is_picture());
        let tower = tower.context("the plan has no tower that reads sound: compile it with --mmproj")?;
        Media::frames_of(plan, tower, samples, None)
    }

    /// So many of the first frames of a sound, or all.
    fn frames_of(plan: &Plan, tower: usize, samples: &[f32], most: Option<u32>) -> Result<Media> {
        let medium = plan.towers[tower].medium;
        let Frames { mut values, count } = media::frames(medium, samples)?;
        let columns = most.map_or(count, |most| most.min(count));
        values.truncate((columns * medium.row_width()) as usize);
        Ok(Media { tower, values, columns, rows: 1 })
    }

    pub fn read(&self, session: &mut Session) -> Result<Soft> {
        let patches = Patches { values: &self.values, columns: self.columns, rows: self.rows };
        Ok(session.soft_tokens(self.tower, patches)?)
    }
}
