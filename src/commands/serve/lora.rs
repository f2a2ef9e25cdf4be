//! The arguments about adapters: those that are always on, those that requests choose by a name, and how many seats of
//! what rank a model needs for them.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::adapter;
use gemma4c_plan::{MOST_SEAT_RANK, MOST_SEATS, Plan, SEAT_RANK_STEP, Seats};
use gemma4c_serve::{Named, check_name};

use crate::options::AdapterAt;

/// Seats where clients load adapters and nobody says how many there are to be.
const USUAL_SEATS: u32 = 4;

#[derive(Clone, clap::Args)]
pub struct LoraArgs {
    /// An adapter (LoRA). NAME=PATH: for requests whose model is NAME, and for no others; of several models,
    /// NAME@MODEL=PATH says whose it is. FILE[:SCALE]: with a GGUF model, one that is always on, and if wanted how
    /// strong it is to be. May be repeated.
    #[arg(long, value_name = "NAME=PATH|FILE[:SCALE]")]
    lora: Vec<Lora>,

    /// With a GGUF model: adapters that it has room for at once, each in a seat [default: as many as --lora names, and
    /// at least 4 with --lora-loading]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_SEATS)))]
    adapters: Option<u32>,

    /// With a GGUF model: the highest rank of an adapter in a seat [default: that of those that --lora names, or 16]
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_SEAT_RANK)))]
    rank: Option<u32>,

    /// Let clients load and unload adapters, and set their scales: /v1/load_lora_adapter, /v1/unload_lora_adapter,
    /// /lora-adapters.
    #[arg(long, requires = "lora_dir")]
    lora_loading: bool,

    /// A folder below which clients may name adapters. May be repeated.
    #[arg(long, value_name = "DIR", requires = "lora_loading")]
    lora_dir: Vec<PathBuf>,
}

/// What `--lora` gives.
#[derive(Clone, Debug, PartialEq)]
enum Lora {
    Always(AdapterAt),
    Named { name: String, model: Option<String>, path: PathBuf },
}

impl FromStr for Lora {
    type Err = String;

    fn from_str(text: &str) -> Result<Lora, String> {
        let named = text.split_once('=').filter(|_| !PathBuf::from(text).exists());
        let Some((name, path)) = named else { return Ok(Lora::Always(text.parse()?)) };
        if path.is_empty() {
            return Err("expected NAME=PATH, the path of a file or a folder".into());
        }
        let (name, model) = match name.split_once('@') {
            None => (name, None),
            Some((name, model)) => (name, Some(model.to_owned())),
        };
        check_name(name)?;
        Ok(Lora::Named { name: name.into(), model, path: path.into() })
    }
}

/// A model among those that are served, as its adapters may call it.
pub struct Called<'a> {
    pub alias: Option<&'a str>,
    /// As it was given.
    pub argument: &'a Path,
}

impl LoraArgs {
    /// Adapters that are always on.
    pub fn always(&self) -> Vec<AdapterAt> {
        let of = |lora: &Lora| match lora {
            Lora::Always(at) => Some(at.clone()),
            Lora::Named { .. } => None,
        };
        self.lora.iter().filter_map(of).collect()
    }

    /// The folders that clients may load from, where they may load at all.
    pub fn folders(&self) -> Option<Vec<PathBuf>> {
        self.lora_loading.then(|| self.lora_dir.clone())
    }

    /// Refuses adapters that are of no model, or nobody knows of which.
    pub fn check(&self, models: &[Called<'_>]) -> Result<()> {
        for lora in &self.lora {
            let Lora::Named { name, model, .. } = lora else { continue };
            match model {
                None => ensure!(
                    models.len() == 1,
                    "--lora {name}=...: {} models are given; say whose it is: --lora {name}@MODEL=..., with the model's \
                     --alias, or as it is given here",
                    models.len()
                ),
                Some(wanted) => {
                    let fits = models.iter().filter(|called| called.is(wanted)).count();
                    ensure!(fits > 0, "--lora {name}@{wanted}=...: no model that is given is called {wanted}");
                    ensure!(fits == 1, "--lora {name}@{wanted}=...: {fits} models that are given are called {wanted}");
                }
            }
        }
        Ok(())
    }

    /// Those of a model that requests choose.
    pub fn named(&self, of: &Called<'_>) -> Vec<Named> {
        let named = self.lora.iter().filter_map(|lora| match lora {
            Lora::Named { name, model, path } if model.as_ref().is_none_or(|model| of.is(model)) => {
                Some(Named { name: name.clone(), path: path.clone() })
            }
            _ => None,
        });
        named.collect()
    }

    /// The seats that a model is compiled with.
    pub fn seats(&self, named: &[Named]) -> Result<Option<Seats>> {
        let count = named.len() as u32;
        let count = match self.adapters {
            Some(adapters) => {
                ensure!(adapters >= count, "--adapters {adapters}: {count} adapters are named (--lora NAME=PATH)");
                adapters
            }
            None if self.lora_loading => count.max(USUAL_SEATS),
            None => count,
        };
        if count == 0 {
            ensure!(self.rank.is_none(), "--rank is about seats for adapters: it needs --adapters or --lora NAME=PATH");
            return Ok(None);
        }
        let rank = self.rank.unwrap_or(SEAT_RANK_STEP).next_multiple_of(SEAT_RANK_STEP);
        let Some((name, highest)) = highest_rank(named)? else { return Ok(Some(Seats { count, rank })) };
        if let Some(given) = self.rank {
            ensure!(highest <= rank, "--rank {given}: the adapter {name} has rank {highest}");
        }
        Ok(Some(Seats { count, rank: rank.max(highest.next_multiple_of(SEAT_RANK_STEP)) }))
    }

    /// A plan that was compiled before has its own seats.
    pub fn check_plan(&self, plan: &Plan, file: &Path, named: &[Named]) -> Result<()> {
        let file = file.display();
        ensure!(
            self.always().is_empty(),
            "--lora FILE is for a GGUF model; {file} is a plan: --lora NAME=FILE is for its seats"
        );
        for (name, is_given) in [("--adapters", self.adapters.is_some()), ("--rank", self.rank.is_some())] {
            ensure!(!is_given, "{name} is for a GGUF model; {file} is a plan, compiled with its own");
        }
        let most = plan.model.seats.map_or(0, |seats| seats.count as usize);
        if named.len() > most {
            let count = named.len();
            bail!(
                "{file} has seats for {most} adapters, and {count} are named: compile it with --adapters {count}, or give \
                 the model in its place"
            );
        }
        Ok(())
    }
}

impl Called<'_> {
    fn is(&self, name: &str) -> bool {
        self.alias == Some(name) || self.argument == Path::new(name)
    }
}

/// The highest rank of adapters, and who has it.
fn highest_rank(named: &[Named]) -> Result<Option<(&str, u32)>> {
    let mut highest = None;
    for Named { name, path } in named {
        let stored = adapter::read(path).with_context(|| format!("--lora {name}={}", path.display()))?;
        let rank = stored.summary().ranks.into_iter().max().unwrap_or(0);
        ensure!(rank <= MOST_SEAT_RANK.into(), "--lora {name}: rank {rank}, and a seat takes {MOST_SEAT_RANK} at most");
        let is_higher = highest.is_none_or(|(_, highest)| rank as u32 > highest);
        highest = if is_higher { Some((name.as_str(), rank as u32)) } else { highest };
    }
    Ok(highest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, model: Option<&str>, path: &str) -> Lora {
        Lora::Named { name: name.into(), model: model.map(Into::into), path: path.into() }
    }

    #[test]
    fn an_adapter_has_a_name_or_is_always_on() {
        let parse = |text: &str| text.parse::<Lora>();
        assert_eq!(parse("sql=a/b.gguf"), Ok(named("sql", None, "a/b.gguf")));
        assert_eq!(parse("sql=a=b:0.5"), Ok(named("sql", None, "a=b:0.5")));
        assert_eq!(parse("org/sql@ggml-org/x:Q8_0=p"), Ok(named("org/sql", Some("ggml-org/x:Q8_0"), "p")));
        assert_eq!(parse("a.gguf:0.5"), Ok(Lora::Always(AdapterAt { path: "a.gguf".into(), scale: 0.5 })));
        for wrong in ["sql=", "=a", "a b=c", "@m=c", "a:latest=c", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
