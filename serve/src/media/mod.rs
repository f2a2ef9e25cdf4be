//! Pictures and sounds of a request: parts of its messages made into what the plan's towers read.
//!
//! A part brings its file as a data URL or as base64, or names where it lies. What lies elsewhere was fetched before
//! (`fetch.rs`). Files are decoded on the threads that read requests, within limits: of bytes by the body's, of pixels
//! and seconds by the decoders', of media by their number, and of all that is decoded and not answered yet by one limit
//! of the server.

mod fetch;
mod fetched;
mod film;
mod source;

use std::sync::Arc;

use gemma4c_models::media::{Grid, USUAL_BUDGET, expand};
use gemma4c_plan::{MediaTokens, Plan};
use gemma4c_runtime::engine::Attachment;
use gemma4c_runtime::{Patches, TowerLimits};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
pub use fetch::{AllowedHosts, fetch_all, remote_urls};
pub use fetched::Fetched;
use film::Film;
use source::{Detail, Kind, MOST_MEDIA, Part, Source};

/// What templates write in the place of a picture and of a film.
const PICTURE: &str = "<|image|>";
const FILM: &str = "<|video|>";

/// What is counted when media take memory.
const UNIT: usize = 1 << 16;

/// What a server reads besides text.
pub struct Senses {
    towers: Vec<Sense>,
    /// Soft tokens of a picture whose request does not say how many.
    budget: u32,
    /// What the plan has room for.
    most: u32,
    pub hosts: AllowedHosts,
    /// Units of memory that decoded media of all requests may still take.
    room: Arc<Semaphore>,
    room_bytes: usize,
}

/// One tower.
struct Sense {
    limits: TowerLimits,
    tokens: MediaTokens,
}

impl Senses {
    /// Of a plan. `image_tokens` is no more than it has room for; `room_bytes` is what decoded media may take together.
    pub fn new(plan: &Plan, image_tokens: Option<u32>, hosts: AllowedHosts, room_bytes: usize) -> Senses {
        let limits = TowerLimits::of(plan).into_iter();
        let towers = limits.zip(&plan.towers).map(|(limits, tower)| Sense { limits, tokens: tower.tokens });
        let picture = plan.towers.iter().find(|tower| tower.medium.is_picture());
        let most = picture.map_or(0, |tower| tower.program.asked);
        Senses {
            towers: towers.collect(),
            budget: image_tokens.unwrap_or(USUAL_BUDGET).min(most),
            most,
            hosts,
            room: Arc::new(Semaphore::new((room_bytes / UNIT).min(Semaphore::MAX_PERMITS))),
            room_bytes,
        }
    }

    /// Text alone, whatever the plan has.
    pub fn none() -> Senses {
        let (towers, hosts) = (Vec::new(), AllowedHosts::default());
        Senses { towers, budget: 0, most: 0, hosts, room: Arc::new(Semaphore::new(0)), room_bytes: 0 }
    }

    fn tower(&self, kind: Kind) -> Option<usize> {
        self.towers.iter().position(|sense| sense.limits.medium.is_picture() == (kind == Kind::Picture))
    }

    /// Whether there is a tower for sounds.
    pub fn hears(&self) -> bool {
        self.tower(Kind::Sound).is_some()
    }

    /// Takes the memory of something decoded, until what is given back is dropped.
    pub fn hold(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.room).try_acquire_many_owned(bytes.div_ceil(UNIT) as u32).map_err(|_| {
            let most = self.room_bytes;
            let message =
                format!("pictures and sounds of requests that have no answer yet may take {most} bytes, and do");
            ApiError::queue_full(message)
        })
    }

    fn no_tower(&self, kind: Kind) -> String {
        format!("the plan has no tower for {}; it reads {}", kind.plural(), self.modalities().join(", "))
    }

    /// What messages may have in them, as clients call it.
    pub fn modalities(&self) -> Vec<&'static str> {
        let of = |kind: Kind| self.tower(kind).map(|_| kind.name());
        [Some("text"), of(Kind::Picture), of(Kind::Sound)].into_iter().flatten().collect()
    }
}

/// Memory that media take while it lives.
pub type Held = Vec<OwnedSemaphorePermit>;

/// Media of a request in the order of their parts.
#[derive(Default)]
pub struct Items {
    items: Vec<Item>,
    /// What stands in the prompt for each film.
    films: Vec<String>,
    held: Held,
}

struct Item {
    attachment: Attachment,
    soft: usize,
}

impl Items {
    /// Where a part of a message is a picture or a sound: takes it, and returns what the template knows it as. `param`
    /// names the part.
    pub fn take(
        &mut self,
        param: &str,
        part: &Value,
        senses: &Senses,
        fetched: &Fetched,
    ) -> Result<Option<Value>, ApiError> {
        if let Some(film) = Film::read(param, part)? {
            for frame in &film.frames {
                self.take_file(param, Kind::Picture, frame, Detail::Low, senses, fetched)?;
            }
            self.films.push(film.text(PICTURE));
            return Ok(Some(json!({ "type": "video" })));
        }
        let Some(Part { kind, source, detail }) = Part::read(param, part)? else { return Ok(None) };
        self.take_file(param, kind, &source, detail, senses, fetched)?;
        Ok(Some(json!({ "type": kind.name() })))
    }

    fn take_file(
        &mut self,
        param: &str,
        kind: Kind,
        source: &Source<'_>,
        detail: Detail,
        senses: &Senses,
        fetched: &Fetched,
    ) -> Result<(), ApiError> {
        let wrong = |message: String| ApiError::invalid(param, format!("{param}: {message}"));
        let Some(tower) = senses.tower(kind) else { return Err(wrong(senses.no_tower(kind))) };
        if self.items.len() == MOST_MEDIA {
            return Err(wrong(format!("a request has {MOST_MEDIA} pictures and sounds at most")));
        }
        let bytes = source.bytes(fetched).map_err(wrong)?;
        let budget = detail.budget(senses.budget, senses.most).map_err(wrong)?;
        let grid = Grid::read(senses.towers[tower].limits.medium, budget, &bytes);
        self.add(tower, &grid.map_err(|error| wrong(error.to_string()))?, senses, &wrong)
    }

    /// Puts the frames of films where the template has left their places. What a client wrote is quoted, and has none.
    pub fn spell_out(&mut self, rendered: String) -> Result<String, ApiError> {
        let films = std::mem::take(&mut self.films);
        if films.is_empty() {
            return Ok(rendered);
        }
        if rendered.matches(FILM).count() != films.len() {
            let message = "the chat template leaves films out of this conversation";
            return Err(ApiError::invalid("messages", message));
        }
        Ok(films.iter().fold(rendered, |text, film| text.replacen(FILM, film, 1)))
    }

    /// The same of a sound that was decoded before.
    pub fn take_sound(&mut self, param: &str, samples: &[f32], senses: &Senses) -> Result<Value, ApiError> {
        let wrong = |message: String| ApiError::invalid(param, format!("{param}: {message}"));
        let tower = senses.tower(Kind::Sound).ok_or_else(|| wrong(senses.no_tower(Kind::Sound)))?;
        let grid = Grid::of_sound(senses.towers[tower].limits.medium, samples);
        self.add(tower, &grid.map_err(|error| wrong(error.to_string()))?, senses, &wrong)?;
        Ok(json!({ "type": Kind::Sound.name() }))
    }

    fn add(
        &mut self,
        tower: usize,
        grid: &Grid,
        senses: &Senses,
        wrong: &dyn Fn(String) -> ApiError,
    ) -> Result<(), ApiError> {
        let patches = Patches { values: &grid.values, columns: grid.columns, rows: grid.rows };
        let soft = senses.towers[tower].limits.soft_tokens(patches).map_err(|error| wrong(error.to_string()))?;
        self.held.push(senses.hold(4 * grid.values.len())?);
        self.items.push(Item { attachment: Attachment::new(tower, 0, patches), soft });
        Ok(())
    }

    /// Puts every medium into the tokens of a prompt, which has one placeholder for each.
    pub fn place(self, tokens: Vec<u32>, senses: &Senses) -> Result<(Vec<u32>, Vec<Attachment>, Held), ApiError> {
        if self.items.is_empty() {
            return Ok((tokens, Vec::new(), Vec::new()));
        }
        let kinds: Vec<_> = senses.towers.iter().map(|sense| (sense.limits.medium, sense.tokens)).collect();
        let media: Vec<_> = self.items.iter().map(|item| (item.attachment.tower, item.soft)).collect();
        let placed = expand(&tokens, &kinds, &media);
        let (tokens, positions) = placed.map_err(|error| {
            let message = format!("the chat template leaves pictures or sounds out of this conversation: {error}");
            ApiError::invalid("messages", message)
        })?;
        let placed = self.items.into_iter().zip(positions).map(|(item, position)| item.attachment.at(position));
        let mut attachments: Vec<Attachment> = placed.collect();
        attachments.sort_by_key(|attachment| attachment.position);
        Ok((tokens, attachments, self.held))
    }
}
