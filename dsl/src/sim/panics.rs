//! Panics inside GPU threads: arithmetic overflow and the like, which become faults instead of messages on stderr.

use super::fault::spelled;
use super::thread::CURRENT;
use std::cell::RefCell;

thread_local! {
    /// What the panic hook saw of a panic inside a GPU thread: line and message.
    static PANIC: RefCell<Option<(String, String)>> = const { RefCell::new(None) };
}

/// Line and message of the panic that has just ended a GPU thread.
pub(crate) fn take() -> (String, String) {
    PANIC.take().unwrap_or_else(|| (spelled(None), "a panic without a message".into()))
}

fn panic_message(payload: &dyn std::any::Any) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_string()
}

/// Installs, once, a panic hook that keeps quiet about panics inside GPU threads and remembers their line.
pub(crate) fn watch() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CURRENT.get().is_null() {
                return previous(info);
            }
            let line = info.location().map_or_else(|| spelled(None), |at| format!("{}:{}", at.file(), at.line()));
            let message = panic_message(info.payload());
            PANIC.set(Some((line, message)));
        }));
    });
}
