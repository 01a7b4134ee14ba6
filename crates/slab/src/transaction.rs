//! All or nothing, on error and on panic.

use crate::Arena;
use crate::arena::Savepoint;

pub(crate) trait HasArena {
    fn arena_mut(&mut self) -> &mut Arena;
}

/// Rolls back when dropped, which a panic in the body does too.
struct RollBack<'a, S: HasArena> {
    owner: &'a mut S,
    savepoint: Option<Savepoint>,
}

impl<S: HasArena> Drop for RollBack<'_, S> {
    fn drop(&mut self) {
        if let Some(savepoint) = &self.savepoint {
            self.owner.arena_mut().roll_back(savepoint);
        }
    }
}

pub(crate) fn run<S: HasArena, T, E>(
    owner: &mut S,
    body: impl FnOnce(&mut S) -> Result<T, E>,
) -> Result<T, E> {
    let savepoint = owner.arena_mut().begin();
    let mut guard = RollBack { owner, savepoint: Some(savepoint) };
    let result = body(guard.owner);
    if result.is_ok()
        && let Some(savepoint) = guard.savepoint.take()
    {
        guard.owner.arena_mut().commit(&savepoint);
    }
    result
}
