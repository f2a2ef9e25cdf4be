//! The arguments about models that are named instead of given as files, and what is said while one is fetched.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use gemma4c_hub::HubError;

use crate::by_name::{self, Beside, Brought};
use crate::device::Device;
use crate::progress::Fetching;

/// What comes along with a model that is named.
#[derive(Clone, Default, clap::Args)]
pub struct ByNameArgs {
    /// Of a model given by its name: without its projector, which reads pictures and sound
    #[arg(long)]
    no_mmproj: bool,

    /// Of a model given by its name: without its drafter, which guesses tokens
    #[arg(long)]
    no_draft: bool,
}

impl ByNameArgs {
    /// Brings a model here if `given` is the name of one; `None`: it is a file, or nothing.
    pub fn bring(&self, given: &Path, device: Device, beside: Beside) -> Result<Option<Brought>> {
        let Some(name) = by_name::name(given) else {
            let given = given.display();
            ensure!(!self.no_mmproj, "--no-mmproj is for a model given by its name; {given} is a file");
            ensure!(!self.no_draft, "--no-draft is for a model given by its name; {given} is a file");
            return Ok(None);
        };
        let Beside { projector, drafter } = beside;
        let beside = Beside { projector: projector && !self.no_mmproj, drafter: drafter && !self.no_draft };
        let mut fetching = Fetching::default();
        let brought = by_name::bring(&name, device, beside, &mut |told| fetching.show(told));
        fetching.clear();
        match brought {
            // A path that is mistyped may look like a name.
            Err(error @ HubError::NoRepository { .. }) => {
                Err(error).with_context(|| format!("there is no file {}, and as a model's name", given.display()))
            }
            brought => Ok(Some(brought?)),
        }
    }
}
