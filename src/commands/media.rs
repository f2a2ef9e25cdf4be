//! Pictures and sound on the command line: read, made into what a tower reads, and put in the places that a prompt
//! holds for them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::{ArgMatches, Command};
use gemma4c_models::media::{BUDGETS, Grid, USUAL_BUDGET, around, expand};
use gemma4c_plan::{Plan, Tower};
use gemma4c_runtime::cpu::Tap;
use gemma4c_runtime::{Patches, RuntimeError, Session, Soft};

use crate::files;

/// A medium's file is smaller than this; a larger one is not read into memory to find out.
const LARGEST_FILE: u64 = 256 << 20;

/// The flags, as clap reads them.
#[derive(Default, clap::Args)]
struct Flags {
    /// A picture for the prompt: PNG, JPEG, WebP or GIF. May be repeated. The plan must have been compiled with
    /// --mmproj.
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,

    /// A sound for the prompt, of 30 seconds at most: WAV, FLAC or MP3. May be repeated; pictures and sounds stand in
    /// the order of the command line.
    #[arg(long = "audio", value_name = "FILE")]
    sounds: Vec<PathBuf>,

    /// Soft tokens of a picture, at most: 70, 140, 280, 560 or 1120 [default: 280, or what the plan has room for if
    /// that is less]
    #[arg(long, value_name = "N", value_parser = budget)]
    image_tokens: Option<u32>,
}

/// Pictures and sounds for a prompt.
#[derive(Default)]
pub struct MediaArgs {
    /// In the order of the command line.
    files: Vec<(Sense, PathBuf)>,
    image_tokens: Option<u32>,
}

impl clap::Args for MediaArgs {
    fn augment_args(command: Command) -> Command {
        Flags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Flags::augment_args_for_update(command)
    }
}

impl clap::FromArgMatches for MediaArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<MediaArgs, clap::Error> {
        let flags = Flags::from_arg_matches(matches)?;
        let at = |id: &str| matches.indices_of(id).into_iter().flatten().collect::<Vec<_>>();
        let images = at("images").into_iter().zip(flags.images.into_iter().map(|path| (Sense::Sight, path)));
        let sounds = at("sounds").into_iter().zip(flags.sounds.into_iter().map(|path| (Sense::Hearing, path)));
        let mut files: Vec<(usize, (Sense, PathBuf))> = images.chain(sounds).collect();
        files.sort_by_key(|(at, _)| *at);
        Ok(MediaArgs { files: files.into_iter().map(|(_, file)| file).collect(), image_tokens: flags.image_tokens })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = MediaArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

/// A number of soft tokens that pictures may have.
pub fn budget(text: &str) -> Result<u32, String> {
    let known = text.parse().ok().filter(|n| BUDGETS.contains(n));
    known.ok_or_else(|| "a picture has 70, 140, 280, 560 or 1120 soft tokens at most".into())
}

/// What a medium is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sense {
    Sight,
    Hearing,
}

impl Sense {
    /// The tower that reads such media; its values are found under the name.
    pub const fn tower(self) -> &'static str {
        match self {
            Sense::Sight => "vision",
            Sense::Hearing => "audio",
        }
    }

    /// What a chat template calls a part of a message.
    const fn part(self) -> &'static str {
        match self {
            Sense::Sight => "image",
            Sense::Hearing => "audio",
        }
    }
}

/// One picture or sound, ready for its tower.
pub struct Item {
    pub sense: Sense,
    /// Index of the tower in the plan.
    pub tower: usize,
    /// Patches or frames.
    pub values: Vec<f32>,
    pub columns: u32,
    pub rows: u32,
    /// Soft tokens that become of it.
    soft: usize,
}

/// Sees every value of a tower: the item's number, the value's name, its width and its rows.
pub type ItemTap<'a> = dyn FnMut(usize, &str, usize, &mut [f32]) + Send + 'a;

/// The media of a command, in the order in which they stand in the prompt.
#[derive(Default)]
pub struct Media {
    pub items: Vec<Item>,
}

impl MediaArgs {
    /// Soft tokens of a picture, where they were given.
    pub fn image_tokens(&self) -> Option<u32> {
        self.image_tokens
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Reads all files; nothing is computed before every one was found right.
    pub fn read(&self, plan: &Plan) -> Result<Media> {
        let items = self.files.iter().map(|(sense, path)| self.read_one(plan, *sense, path));
        Ok(Media { items: items.collect::<Result<_>>()? })
    }

    pub fn read_one(&self, plan: &Plan, sense: Sense, path: &Path) -> Result<Item> {
        let index = plan.towers.iter().position(|tower| tower.name == sense.tower());
        let index = match (index, sense) {
            (Some(index), _) => index,
            (None, Sense::Sight) => bail!(RuntimeError::NoTower),
            (None, Sense::Hearing) if plan.towers.is_empty() => bail!(RuntimeError::NoTower),
            (None, Sense::Hearing) => bail!(
                "this plan has no tower for sound: its projector has none, or it was compiled for a GPU, where sound does not run so far"
            ),
        };
        let tower = &plan.towers[index];
        let bytes = read_file(path)?;
        let budget = if tower.medium.is_picture() { self.budget(tower)? } else { 0 };
        let grid = Grid::read(tower.medium, budget, &bytes).with_context(|| path.display().to_string())?;
        let soft = grid.soft(tower.medium);
        let Grid { values, columns, rows } = grid;
        Ok(Item { sense, tower: index, values, columns, rows, soft })
    }

    fn budget(&self, tower: &Tower) -> Result<u32> {
        let budget = self.image_tokens.unwrap_or(USUAL_BUDGET.min(tower.program.asked));
        has_room(tower, budget)?;
        Ok(budget)
    }
}

/// Whether a tower takes pictures of so many soft tokens.
pub fn has_room(tower: &Tower, budget: u32) -> Result<()> {
    let room = tower.program.asked;
    ensure!(
        budget <= room,
        "--image-tokens {budget}: the plan has room for {room}; compile it with --image-tokens {budget}"
    );
    Ok(())
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let bytes = files::regular(path)?.len();
    ensure!(bytes <= LARGEST_FILE, "{} has {bytes} bytes: no picture or sound is that large", path.display());
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

impl Item {
    /// Its soft tokens. A device shows values to a tap step by step, which takes longer than without one.
    pub fn look(&self, session: &mut Session, tap: Option<&mut Tap<'_>>) -> Result<Soft> {
        let patches = Patches { values: &self.values, columns: self.columns, rows: self.rows };
        Ok(match tap {
            None => session.soft_tokens(self.tower, patches)?,
            Some(tap) => session.look(self.tower, patches, tap)?,
        })
    }

    /// As a part of a message, for the chat template.
    pub fn part(&self) -> serde_json::Value {
        serde_json::json!({"type": self.sense.part()})
    }
}

impl Media {
    /// The soft tokens of each item.
    pub fn look(&self, session: &mut Session, mut tap: Option<&mut ItemTap<'_>>) -> Result<Vec<Soft>> {
        let look = |(index, item): (usize, &Item)| match &mut tap {
            None => item.look(session, None),
            Some(tap) => item.look(session, Some(&mut |name, width, rows| tap(index, name, width, rows))),
        };
        self.items.iter().enumerate().map(look).collect()
    }

    /// The items of one sense, with their numbers among all.
    pub fn of(&self, sense: Sense) -> impl Iterator<Item = (usize, &Item)> {
        self.items.iter().enumerate().filter(move |(_, item)| item.sense == sense)
    }

    /// The tokens of all items behind each other, as they stand before a text.
    pub fn tokens(&self, plan: &Plan) -> Vec<u32> {
        self.items.iter().flat_map(|item| around(plan.towers[item.tower].tokens, item.soft)).collect()
    }
}

/// A prompt as the chat template writes it, with one placeholder an item, made one with a placeholder for each soft
/// token.
pub fn expand_placeholders(items: &[Item], plan: &Plan, prompt: &[u32]) -> Result<Vec<u32>> {
    let kinds: Vec<_> = plan.towers.iter().map(|tower| (tower.medium, tower.tokens)).collect();
    let media: Vec<_> = items.iter().map(|item| (item.tower, item.soft)).collect();
    Ok(expand(prompt, &kinds, &media)?.0)
}
