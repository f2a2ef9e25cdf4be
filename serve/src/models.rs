//! The models of a server, by the names that requests give them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::body::Body;
use axum::http::HeaderMap;

use crate::adapters::Folders;
use crate::app::App;
use crate::body::{self, Received};
use crate::error::ApiError;
use crate::hand::Hand;
use crate::record::Record;

/// All of them; the first is who answers where nobody is named.
pub struct Models {
    all: Vec<Arc<App>>,
    pub hand: Arc<Hand>,
    /// Where adapters may be loaded from; `None` where none are loaded.
    pub folders: Option<Folders>,
    naming: Mutex<()>,
}

impl Models {
    /// At least one.
    pub fn new(all: Vec<Arc<App>>, folders: Option<Folders>) -> Models {
        Models { all, hand: Arc::default(), folders, naming: Mutex::default() }
    }

    pub fn all(&self) -> &[Arc<App>] {
        &self.all
    }

    pub fn first(&self) -> &Arc<App> {
        &self.all[0]
    }

    /// Who answers requests that name this one.
    pub fn named(&self, name: &str) -> Result<Arc<App>, ApiError> {
        match self.listed(name) {
            Some(app) => Ok(app),
            None if self.first().takes_any_model => Ok(Arc::clone(self.first())),
            None => Err(self.first().unknown_model(name)),
        }
    }

    /// The model of a name, or the adapter.
    pub fn listed(&self, name: &str) -> Option<Arc<App>> {
        let adapted = || self.all.iter().find_map(|app| app.adapted(name)).map(Arc::new);
        self.model(name).cloned().or_else(adapted)
    }

    /// The model of a name that is no adapter's.
    pub fn model(&self, name: &str) -> Option<&Arc<App>> {
        self.all.iter().find(|app| app.is_called(name))
    }

    /// The model that has an adapter of this name.
    pub fn holder(&self, adapter: &str) -> Option<&Arc<App>> {
        self.all.iter().find(|app| app.adapters.has(adapter))
    }

    /// All models, each with its adapters behind it.
    pub fn with_adapters(&self) -> Vec<Arc<App>> {
        let adapted = |app: &Arc<App>| -> Vec<Arc<App>> {
            app.adapters.list().iter().filter_map(|listed| app.adapted(&listed.name)).map(Arc::new).collect()
        };
        self.all.iter().flat_map(|app| [Arc::clone(app)].into_iter().chain(adapted(app))).collect()
    }

    /// Whoever looks for a free name holds this until the name is taken.
    pub fn naming(&self) -> MutexGuard<'_, ()> {
        self.naming.lock().unwrap_or_else(PoisonError::into_inner)
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
        let named = if self.is_alone() { None } else { model(&body) };
        let app = named.map_or_else(|| Ok(Arc::clone(self.first())), |name| self.named(&name))?;
        record.set_model(&app.model);
        app.state.check()?;
        Ok((app, body))
    }

    /// Whether there is one model without adapters, whom all requests are for.
    pub fn is_alone(&self) -> bool {
        self.all.len() == 1 && self.first().adapters.seats().is_none()
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
