//! The models of a server, by the names that requests give them.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::HeaderMap;

use crate::app::App;
use crate::body::{self, Received};
use crate::error::ApiError;
use crate::hand::Hand;
use crate::record::Record;

/// All of them; the first is who answers where nobody is named.
pub struct Models {
    all: Vec<Arc<App>>,
    pub hand: Arc<Hand>,
}

impl Models {
    /// At least one.
    pub fn new(all: Vec<Arc<App>>) -> Models {
        Models { all, hand: Arc::default() }
    }

    pub fn all(&self) -> &[Arc<App>] {
        &self.all
    }

    pub fn first(&self) -> &Arc<App> {
        &self.all[0]
    }

    /// The model of a name.
    pub fn named(&self, name: &str) -> Result<&Arc<App>, ApiError> {
        match self.all.iter().find(|app| app.is_called(name)) {
            Some(app) => Ok(app),
            None if self.first().takes_any_model => Ok(self.first()),
            None => Err(self.first().unknown_model(name)),
        }
    }

    /// Receives a request's body, and finds out whom it is for.
    pub async fn receive(
        &self,
        headers: &HeaderMap,
        body: Body,
        record: &Record,
    ) -> Result<(Arc<App>, Received), ApiError> {
        self.receive_by(headers, body, record, Received::model).await
    }

    /// The same of a body that says it in another way than JSON does.
    pub async fn receive_by(
        &self,
        headers: &HeaderMap,
        body: Body,
        record: &Record,
        model: impl FnOnce(&Received) -> Option<String>,
    ) -> Result<(Arc<App>, Received), ApiError> {
        self.check()?;
        let body = body::receive(headers, body).await?;
        let app = match &self.all[..] {
            [only] => only,
            _ => model(&body).map_or(Ok(self.first()), |name| self.named(&name))?,
        };
        record.set_model(&app.model);
        app.state.check()?;
        Ok((Arc::clone(app), body))
    }

    /// Whether requests are taken for any of them.
    pub fn check(&self) -> Result<(), ApiError> {
        let mut checks = self.all.iter().map(|app| app.state.check());
        let first = checks.next().unwrap_or(Ok(()));
        if first.is_ok() || checks.any(|check| check.is_ok()) { Ok(()) } else { first }
    }

    /// Requests that wait for their turn.
    pub fn waiting(&self) -> usize {
        self.all.iter().map(|app| app.state.waiting()).sum()
    }

    /// When the oldest request without a whole answer was begun.
    pub fn oldest_active(&self) -> Option<Instant> {
        self.all.iter().filter_map(|app| app.state.oldest_active()).min()
    }

    /// Requests without a whole answer.
    pub fn active(&self) -> usize {
        self.all.iter().map(|app| app.state.active()).sum()
    }
}
