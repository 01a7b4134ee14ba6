//! What threads share: a value behind a lock, and the switch that stops whoever holds it.
//!
//! `tests/loom` has this file to itself and tries every order in which threads can get through it.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(loom)]
use loom::sync::{Arc, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::{Arc, Mutex, MutexGuard};

/// A value that one thread uses at a time. Whoever panics with it poisons it.
pub(crate) struct Shared<T>(Mutex<T>);

/// The value, for as long as this lives.
pub(crate) type Held<'a, T> = MutexGuard<'a, T>;

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Waits for the value; nothing if a thread has panicked with it.
    pub(crate) fn hold(&self) -> Option<Held<'_, T>> {
        self.0.lock().ok()
    }
}

/// Stops a generation from elsewhere: a signal handler, another thread. Clones are one switch.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Ends the generation before its next token, also while it computes its prompt.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Lets the next generation run.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
