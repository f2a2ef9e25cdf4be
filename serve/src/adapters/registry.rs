//! Which adapter has which seat, and who sits there.
//!
//! A name stands for a seat. A request that has chosen one keeps what is in its seat until it ends: a name that goes,
//! or gets other weights, leaves its seat to those who are there, and with the last of them the seat is free. So a
//! change never waits for requests unless it needs their very seat.
//!
//! What a seat has is also kept in host memory: a model that leaves the device and comes back gets the same weights,
//! whatever has become of the files. Nothing here touches the engine; who changes a seat holds a reservation of it, and
//! tells the engine's thread.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use gemma4c_models::adapter::{OpenAdapter, Seating};
use gemma4c_plan::{Plan, SeatWeights, Seats};
use gemma4c_runtime::engine::Seated;
use tokio::sync::Notify;
use xxhash_rust::xxh3::Xxh3;

use super::asked::Asked;
use super::name::check_name;
use crate::error::ApiError;

/// An adapter that a server begins with.
#[derive(Clone, Debug)]
pub struct Named {
    /// For clients.
    pub name: String,
    pub path: PathBuf,
}

/// Why a server does not begin with its adapters.
#[derive(Debug, thiserror::Error)]
pub enum SeatingError {
    #[error("adapter {name:?}: {why}")]
    Name { name: String, why: String },
    #[error("the adapter {0:?} has the name of a model or of another adapter")]
    SameName(String),
    #[error("the plan has seats for {seats} adapters, and {named} are named: compile it with --adapters {named}")]
    TooMany { named: usize, seats: usize },
}

/// What a seat has.
#[derive(Clone)]
pub struct Filling {
    pub weights: Arc<SeatWeights>,
    bytes: u64,
    /// Says which weights these are.
    digest: u128,
}

impl Filling {
    fn new(weights: SeatWeights) -> Filling {
        let mut hash = Xxh3::new();
        weights.matrices.iter().for_each(|matrix| hash.update(matrix));
        let bytes = weights.matrices.iter().map(|matrix| matrix.len() as u64).sum();
        Filling { weights: Arc::new(weights), bytes, digest: hash.digest128() }
    }
}

/// The adapters of one model.
pub struct Adapters {
    /// None without seats in its plan.
    seats: Option<Seats>,
    reader: Option<OpenAdapter>,
    books: Mutex<Books>,
    /// Somebody has stood up, or a name that was about to move has moved.
    changed: Notify,
}

#[derive(Default)]
struct Books {
    seats: Vec<Seat>,
    named: Vec<Entry>,
    /// Names that are being loaded.
    loading: BTreeSet<String>,
    next_id: u32,
}

#[derive(Default)]
struct Seat {
    /// What is in it; none before it is filled.
    filling: Option<Filling>,
    /// Requests that sit there.
    users: usize,
    /// It is about to be filled.
    is_reserved: bool,
}

impl Seat {
    fn is_free(&self) -> bool {
        self.filling.is_none() && !self.is_reserved
    }
}

/// What a name stands for.
struct Entry {
    id: u32,
    name: Arc<str>,
    path: String,
    strength: f32,
    filling: Filling,
    /// None while it gets other weights in its own seat: who asks for it waits.
    seat: Option<usize>,
    requests: u64,
}

/// An adapter as it is listed.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    pub id: u32,
    pub name: Arc<str>,
    pub path: String,
    /// How strong it is for requests that do not say it.
    pub strength: f32,
    /// Requests that have chosen it since it was loaded.
    pub requests: u64,
    /// Of its weights, and which they are.
    pub bytes: u64,
    pub digest: u128,
}

/// A request that has chosen an adapter. Its seat stays as it is while this lives.
pub struct Sitting {
    adapters: Arc<Adapters>,
    seat: usize,
    strength: f32,
}

impl Sitting {
    /// As the engine is told.
    pub fn seated(&self) -> Seated {
        Seated { seat: number(self.seat), strength: self.strength }
    }
}

/// A request that is several for the engine sits as often.
impl Clone for Sitting {
    fn clone(&self) -> Sitting {
        self.adapters.books().seats[self.seat].users += 1;
        Sitting { adapters: Arc::clone(&self.adapters), seat: self.seat, strength: self.strength }
    }
}

impl Drop for Sitting {
    fn drop(&mut self) {
        self.adapters.books().seats[self.seat].users -= 1;
        self.adapters.changed.notify_waiters();
    }
}

/// Engines count seats from 1.
pub fn number(seat: usize) -> u32 {
    seat as u32 + 1
}

impl Adapters {
    /// Of a plan, with those that a server begins with in their seats.
    pub fn new(plan: &Plan, named: Vec<Named>) -> Result<Adapters, SeatingError> {
        let seats = plan.model.seats;
        let reader = Seating::of(plan).map(Seating::opener);
        let count = seats.map_or(0, |seats| seats.count);
        let books = Books { seats: (0..count).map(|_| Seat::default()).collect(), ..Books::default() };
        let adapters = Adapters { seats, reader, books: Mutex::new(books), changed: Notify::new() };
        adapters.begin_with(named)?;
        Ok(adapters)
    }

    fn begin_with(&self, named: Vec<Named>) -> Result<(), SeatingError> {
        let mut books = self.books();
        if named.len() > books.seats.len() {
            return Err(SeatingError::TooMany { named: named.len(), seats: books.seats.len() });
        }
        for (seat, Named { name, path }) in named.into_iter().enumerate() {
            check_name(&name).map_err(|why| SeatingError::Name { name: name.clone(), why })?;
            if books.find(&name).is_some() {
                return Err(SeatingError::SameName(name));
            }
            let filling = self.read(&path).map_err(|why| SeatingError::Name { name: name.clone(), why })?;
            books.enter(&name, path.display().to_string(), seat, filling);
        }
        Ok(())
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seats of the plan, and the largest rank of an adapter.
    pub fn seats(&self) -> Option<Seats> {
        self.seats
    }

    /// Seats that are not free: with an adapter that has a name, with one that requests still use, or about to be filled.
    pub fn taken(&self) -> usize {
        self.books().seats.iter().filter(|seat| !seat.is_free()).count()
    }

    /// Whether a name stands for one.
    pub fn has(&self, name: &str) -> bool {
        self.seats.is_some() && self.books().find(name).is_some()
    }

    /// Whether a name is taken, be it by one that is still being loaded.
    pub fn knows(&self, name: &str) -> bool {
        let books = self.books();
        books.find(name).is_some() || books.loading.contains(name)
    }

    /// In the order in which they came.
    pub fn list(&self) -> Vec<Listed> {
        let books = self.books();
        let of = |entry: &Entry| Listed {
            id: entry.id,
            name: Arc::clone(&entry.name),
            path: entry.path.clone(),
            strength: entry.strength,
            requests: entry.requests,
            bytes: entry.filling.bytes,
            digest: entry.filling.digest,
        };
        books.named.iter().map(of).collect()
    }

    pub fn listed(&self, name: &str) -> Option<Listed> {
        self.list().into_iter().find(|listed| *listed.name == *name)
    }

    /// Reads an adapter; takes as long as its files take to read.
    pub fn read(&self, path: &Path) -> Result<Filling, String> {
        let reader = self.reader.as_ref().ok_or("the plan has no seats for adapters")?;
        Ok(Filling::new(reader(path)?))
    }

    /// What the seats of an engine that has just come are to have.
    pub fn fillings(&self) -> Vec<(u32, Arc<SeatWeights>)> {
        let books = self.books();
        let of = |(seat, state): (usize, &Seat)| Some((number(seat), Arc::clone(&state.filling.as_ref()?.weights)));
        books.seats.iter().enumerate().filter_map(of).collect()
    }

    /// Sets how strong adapters are for requests that do not say it: all of them, or none where one is not there.
    pub fn set_strengths(&self, param: &str, asked: &Asked) -> Result<(), ApiError> {
        let mut books = self.books();
        books.check_ids(param, asked)?;
        for (id, strength) in &asked.0 {
            books.named.iter_mut().filter(|entry| entry.id == *id).for_each(|entry| entry.strength = *strength);
        }
        Ok(())
    }

    /// Finds the seat of a request: that of the name in its `model`, or of the one adapter that its `lora` has on.
    /// Nothing is the model as it is. Waits while that adapter gets other weights in its own seat.
    pub async fn sit(
        self: &Arc<Adapters>,
        name: Option<&str>,
        asked: Option<&Asked>,
    ) -> Result<Option<Sitting>, ApiError> {
        if name.is_none() && asked.is_none() {
            return Ok(None);
        }
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            match self.try_sit(name, asked)? {
                Tried::Moving => changed.await,
                Tried::Nobody => return Ok(None),
                Tried::Seated(sitting) => return Ok(Some(sitting)),
            }
        }
    }

    fn try_sit(self: &Arc<Adapters>, name: Option<&str>, asked: Option<&Asked>) -> Result<Tried, ApiError> {
        let mut books = self.books();
        let Some((entry, strength)) = books.chosen(name, asked)? else { return Ok(Tried::Nobody) };
        // An adapter without strength is the model as it is, to the bit.
        if strength == 0.0 {
            return Ok(Tried::Nobody);
        }
        let Some(seat) = entry.seat else { return Ok(Tried::Moving) };
        entry.requests += 1;
        books.seats[seat].users += 1;
        Ok(Tried::Seated(Sitting { adapters: Arc::clone(self), seat, strength }))
    }

    /// Begins to load an adapter. `in_place`: a name that is there already is to get the new weights.
    pub fn reserve(self: &Arc<Adapters>, name: &str, in_place: bool) -> Result<Reservation, ApiError> {
        let mut books = self.books();
        books.refuse_while_loading(name)?;
        let is_there = books.find(name).is_some();
        if is_there && !in_place {
            let message = format!(
                "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
                 'load_inplace' to True."
            );
            return Err(ApiError::invalid("lora_name", message));
        }
        let seat = books.seats.iter().position(Seat::is_free);
        match seat {
            Some(seat) => books.seats[seat].is_reserved = true,
            // It moves within its own seat.
            None if is_there => {}
            None => {
                let message = format!(
                    "lora_name: all {} seats for adapters are taken; unload one, or start the server with more \
                     (--adapters)",
                    books.seats.len()
                );
                return Err(ApiError { code: "no_seat", ..ApiError::invalid("lora_name", message) });
            }
        }
        books.loading.insert(name.to_owned());
        let (adapters, name) = (Arc::clone(self), name.to_owned());
        Ok(Reservation { adapters, name, seat, is_own: false, is_touched: false })
    }

    /// Takes a name away. Its seat is free once `free` is told so, which must wait for `stood_up`.
    pub fn withdraw(&self, name: &str) -> Result<usize, ApiError> {
        let mut books = self.books();
        books.refuse_while_loading(name)?;
        let found = books.named.iter().position(|entry| *entry.name == *name);
        let seat = found.and_then(|at| books.named.remove(at).seat);
        seat.ok_or_else(|| not_found(name))
    }

    /// Waits until nobody sits in a seat whose name is gone.
    pub async fn stood_up(&self, seat: usize) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.books().seats[seat].users == 0 {
                return;
            }
            changed.await;
        }
    }

    pub fn free(&self, seat: usize) {
        self.books().seats[seat] = Seat::default();
    }
}

/// What became of a request that looked for its seat.
enum Tried {
    Seated(Sitting),
    /// It needs none.
    Nobody,
    Moving,
}

pub fn not_found(name: &str) -> ApiError {
    let message = format!("The lora adapter '{name}' cannot be found.");
    let error = ApiError::refused(StatusCode::NOT_FOUND, "adapter_not_found", message);
    ApiError { param: Some("lora_name".into()), ..error }
}

impl Books {
    fn find(&self, name: &str) -> Option<&Entry> {
        self.named.iter().find(|entry| *entry.name == *name)
    }

    /// A name gets the next number.
    fn enter(&mut self, name: &str, path: String, seat: usize, filling: Filling) {
        let id = self.next_id;
        self.next_id += 1;
        self.seats[seat] = Seat { filling: Some(filling.clone()), ..Seat::default() };
        let (name, seat) = (name.into(), Some(seat));
        self.named.push(Entry { id, name, path, strength: 1.0, filling, seat, requests: 0 });
    }

    /// The seat of a name that is being loaded: so the name stays, and has one.
    fn leave_own_seat(&mut self, name: &str) -> usize {
        let entry = self.named.iter_mut().find(|entry| *entry.name == *name);
        let own = entry.and_then(|entry| entry.seat.take()).unwrap_or_default();
        self.seats[own].is_reserved = true;
        own
    }

    fn refuse_while_loading(&self, name: &str) -> Result<(), ApiError> {
        match self.loading.contains(name) {
            false => Ok(()),
            true => {
                let message = format!("lora_name: the adapter {name:?} is being loaded");
                Err(ApiError { param: Some("lora_name".into()), ..ApiError::conflict("adapter_loading", message) })
            }
        }
    }

    fn check_ids(&self, param: &str, asked: &Asked) -> Result<(), ApiError> {
        for (index, (id, _)) in asked.0.iter().enumerate() {
            if !self.named.iter().any(|entry| entry.id == *id) {
                let there: Vec<String> =
                    self.named.iter().map(|entry| format!("{} ({})", entry.id, entry.name)).collect();
                let there = if there.is_empty() { "none".into() } else { there.join(", ") };
                let message = format!("{param}[{index}].id: there is no adapter {id} of this model; there is {there}");
                return Err(ApiError::invalid(param, message));
            }
        }
        Ok(())
    }

    /// The adapter of a request, and how strong it is to be.
    fn chosen(&mut self, name: Option<&str>, asked: Option<&Asked>) -> Result<Option<(&mut Entry, f32)>, ApiError> {
        let Some(asked) = asked else {
            let Some(name) = name else { return Ok(None) };
            let found = self.named.iter_mut().find(|entry| *entry.name == *name);
            let entry = found.ok_or_else(|| {
                let message = format!("the adapter {name:?} is not here any more");
                let error = ApiError::refused(StatusCode::NOT_FOUND, "model_not_found", message);
                ApiError { param: Some("model".into()), ..error }
            })?;
            let strength = entry.strength;
            return Ok(Some((entry, strength)));
        };
        self.check_ids("lora", asked)?;
        let Some((id, strength)) = asked.0.iter().find(|(_, scale)| *scale != 0.0) else { return Ok(None) };
        let Some(entry) = self.named.iter_mut().find(|entry| entry.id == *id) else { return Ok(None) };
        match name.filter(|name| **name != *entry.name) {
            None => Ok(Some((entry, *strength))),
            Some(name) => {
                let message = format!("lora: the model {name:?} is an adapter; {id} is another, {:?}", entry.name);
                Err(ApiError::invalid("lora", message))
            }
        }
    }
}

/// The right to fill a seat for a name. Whoever drops it before it is settled leaves everything as it was.
pub struct Reservation {
    adapters: Arc<Adapters>,
    name: String,
    /// A free one, or the name's own once that was taken from it.
    seat: Option<usize>,
    is_own: bool,
    /// The engine may have begun to fill it.
    is_touched: bool,
}

impl Reservation {
    /// The seat to fill. Where none is free it is the name's own: whoever asks for the name waits from now on, and this
    /// waits until nobody sits there.
    pub async fn take(&mut self) -> usize {
        if let Some(seat) = self.seat {
            return seat;
        }
        let own = self.adapters.books().leave_own_seat(&self.name);
        (self.seat, self.is_own) = (Some(own), true);
        self.adapters.stood_up(own).await;
        own
    }

    /// The engine is told to fill the seat: what was in it is lost.
    pub fn touch(&mut self) {
        self.is_touched = true;
    }

    /// The seat is filled, and the name stands for it. Returns the seat that the name has left.
    pub fn settle(mut self, path: String, filling: Filling) -> Option<usize> {
        let seat = self.seat.take()?;
        let mut books = self.adapters.books();
        let Some(entry) = books.named.iter_mut().find(|entry| *entry.name == *self.name) else {
            books.enter(&self.name, path, seat, filling);
            return None;
        };
        (entry.path, entry.filling) = (path, filling.clone());
        let left = entry.seat.replace(seat);
        books.seats[seat] = Seat { filling: Some(filling), ..Seat::default() };
        left
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut books = self.adapters.books();
        books.loading.remove(&self.name);
        // It was not settled.
        if let Some(seat) = self.seat {
            books.seats[seat].is_reserved = false;
            match (self.is_own, self.is_touched) {
                (false, _) => {}
                (true, false) => {
                    let mut named = books.named.iter_mut();
                    named.find(|entry| *entry.name == *self.name).into_iter().for_each(|entry| entry.seat = Some(seat));
                }
                // The name has nothing left that it could stand for.
                (true, true) => {
                    books.seats[seat].filling = None;
                    books.named.retain(|entry| *entry.name != *self.name);
                }
            }
        }
        drop(books);
        self.adapters.changed.notify_waiters();
    }
}
