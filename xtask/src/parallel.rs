//! Work on many things, several at a time.

use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// As many at a time as there are processors.
pub(crate) fn jobs() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// What `work` makes of each of the items, in their order; they are begun in it, too.
pub(crate) fn map<T: Sync, R: Send + Sync>(
    items: &[T],
    jobs: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Vec<OnceLock<R>> = items.iter().map(|_| OnceLock::new()).collect();
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { break };
                    let _ = results[index].set(work(item));
                }
            });
        }
    });
    results.into_iter().filter_map(OnceLock::into_inner).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    #[test]
    fn results_are_in_the_order_of_the_items_and_so_many_run_at_a_time() {
        let both = Barrier::new(2);
        let met = |item: &u32| {
            both.wait();
            item * item
        };
        assert_eq!(super::map(&[1, 2, 3, 4], 2, met), [1, 4, 9, 16]);
    }
}
