//! Pictures on the command line: read, brought to a tower's size, and put in the places that a prompt holds for them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use gemma4c_models::media::{BUDGETS, Cut, Patches, USUAL_BUDGET, decode};
use gemma4c_plan::{MediaTokens, Plan, Tower};
use gemma4c_runtime::cpu::Tap;
use gemma4c_runtime::{RuntimeError, Session, Soft};

use super::plan_file;

/// A picture's file is smaller than this; a larger one is not read into memory to find out.
const LARGEST_FILE: u64 = 256 << 20;

/// Pictures for a prompt.
#[derive(Default, clap::Args)]
pub struct MediaArgs {
    /// A picture for the prompt: PNG, JPEG, WebP or GIF. May be repeated. The plan must have been compiled with --mmproj.
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,

    /// Soft tokens of a picture, at most: 70, 140, 280, 560 or 1120 [default: 280, or what the plan has room for if that is less]
    #[arg(long, value_name = "N", requires = "images", value_parser = budget)]
    image_tokens: Option<u32>,
}

/// A number of soft tokens that pictures may have.
pub fn budget(text: &str) -> Result<u32, String> {
    let known = text.parse().ok().filter(|n| BUDGETS.contains(n));
    known.ok_or_else(|| "a picture has 70, 140, 280, 560 or 1120 soft tokens at most".into())
}

/// Sees every value of a tower: the picture's number, the value's name, its width and its rows.
pub type PictureTap<'a> = dyn FnMut(usize, &str, usize, &mut [f32]) + Send + 'a;

/// The pictures of a command, ready for their tower.
#[derive(Default)]
pub struct Pictures {
    /// Index of the tower in the plan.
    pub tower: usize,
    pub patches: Vec<Patches>,
}

impl MediaArgs {
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Reads all pictures; nothing is computed before every one was found right.
    pub fn read(&self, plan: &Plan) -> Result<Pictures> {
        if self.is_empty() {
            return Ok(Pictures::default());
        }
        let tower = plan.towers.iter().position(|tower| tower.name == "vision").ok_or(RuntimeError::NoTower)?;
        let Tower { patch, pool, ref program, .. } = plan.towers[tower];
        let room = program.asked;
        let budget = self.image_tokens.unwrap_or(USUAL_BUDGET.min(room));
        ensure!(
            budget <= room,
            "--image-tokens {budget}: the plan has room for {room}; compile it with --image-tokens {budget}"
        );
        let cut = Cut { patch, pool, budget };
        let read = |path: &PathBuf| -> Result<Patches> {
            let bytes = read_file(path)?;
            let patches = || Ok::<_, anyhow::Error>(cut.patches(&decode(&bytes)?)?);
            patches().with_context(|| path.display().to_string())
        };
        Ok(Pictures { tower, patches: self.images.iter().map(read).collect::<Result<_>>()? })
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let bytes = plan_file::regular(path)?.len();
    ensure!(bytes <= LARGEST_FILE, "{} has {bytes} bytes: no picture is that large", path.display());
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

impl Pictures {
    /// The soft tokens of each picture; with a tap, on a device step by step.
    pub fn look(&self, session: &mut Session, mut tap: Option<&mut PictureTap<'_>>) -> Result<Vec<Soft>> {
        let mut all = Vec::new();
        for (index, Patches { values, columns, rows }) in self.patches.iter().enumerate() {
            let patches = gemma4c_runtime::Patches { values, columns: *columns, rows: *rows };
            all.push(match &mut tap {
                None => session.soft_tokens(self.tower, patches)?,
                Some(tap) => {
                    let of_picture: &mut Tap<'_> = &mut |name, width, rows| tap(index, name, width, rows);
                    session.look(self.tower, patches, of_picture)?
                }
            });
        }
        Ok(all)
    }

    /// Soft tokens of a picture.
    fn soft(&self, tower: &Tower, patches: &Patches) -> usize {
        (patches.columns / tower.pool * (patches.rows / tower.pool)) as usize
    }

    /// The tokens of all pictures behind each other, as they stand before a text.
    pub fn tokens(&self, plan: &Plan) -> Vec<u32> {
        let Some(tower) = plan.towers.get(self.tower) else { return Vec::new() };
        self.patches.iter().flat_map(|patches| around(tower.tokens, self.soft(tower, patches))).collect()
    }

    /// A prompt as the chat template writes it, with one placeholder a picture, made one with a placeholder for each soft token.
    pub fn expand(&self, plan: &Plan, prompt: &[u32]) -> Result<Vec<u32>> {
        let Some(tower) = plan.towers.get(self.tower) else { return Ok(prompt.to_vec()) };
        let token = tower.tokens.placeholder;
        let places = prompt.iter().filter(|id| **id == token).count();
        ensure!(
            places == self.patches.len(),
            "the prompt has places for {places} pictures (token {token}), and {} are given",
            self.patches.len()
        );
        let mut counts = self.patches.iter().map(|patches| self.soft(tower, patches));
        let expand = |id: &u32| match *id == token {
            true => around(tower.tokens, counts.next().unwrap_or(0)),
            false => vec![*id],
        };
        Ok(prompt.iter().flat_map(expand).collect())
    }
}

/// The places of one picture's soft tokens, and the tokens around them.
fn around(tokens: MediaTokens, soft: usize) -> Vec<u32> {
    let MediaTokens { begin, placeholder, end } = tokens;
    [&[begin], vec![placeholder; soft].as_slice(), &[end]].concat()
}
