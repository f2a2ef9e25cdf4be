//! Adapters that come and go while a server runs.
//!
//! Files are read and weights prepared beside the threads that serve connections; the engine's thread only copies them,
//! between two steps, and all other requests go on. Each change is a task of its own: a client that goes away leaves
//! nothing half done.
//!
//! Nobody holds a lease of the model while it waits for a seat: those who sit there may be waiting for the model.

use std::path::PathBuf;
use std::sync::Arc;

use super::registry::{Reservation, number};
use crate::app::App;
use crate::body;
use crate::error::ApiError;

/// An adapter that is to be loaded.
pub struct Load {
    pub reservation: Reservation,
    pub path: PathBuf,
    /// As the client has it.
    pub shown: String,
}

/// Loads an adapter; the name stands for it when this returns. The seat that it had before is left to those who sit
/// there.
pub async fn load(app: Arc<App>, load: Load) -> Result<(), ApiError> {
    let Load { mut reservation, path, shown } = load;
    let filling = body::beside(&app, move |app| {
        app.adapters.read(&path).map_err(|error| ApiError::invalid("lora_path", format!("lora_path: {error}")))
    });
    let filling = filling.await?;
    let seat = reservation.take().await;
    // A lease brings the model, and keeps it until the books have what its seat has.
    let lease = app.house.lease(&app.slot).await?;
    reservation.touch();
    lease.worker.fill_seat(number(seat), Arc::clone(&filling.weights)).await?;
    let left = reservation.settle(shown, filling);
    drop(lease);
    if let Some(left) = left {
        tokio::spawn(async move { vacate(&app, left).await });
    }
    Ok(())
}

/// Waits until nobody sits in a seat whose name is gone, and makes it free.
pub async fn vacate(app: &App, seat: usize) -> Result<(), ApiError> {
    app.adapters.stood_up(seat).await;
    // A model that is away, or about to go, takes its seats along.
    let emptied = match app.slot.lease() {
        Some(lease) => lease.worker.empty_seat(number(seat)).await,
        None => Ok(()),
    };
    app.adapters.free(seat);
    emptied
}
