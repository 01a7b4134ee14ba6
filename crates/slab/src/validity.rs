//! Which views survived which rewinds.

use alloc::vec::Vec;

#[derive(Debug)]
struct Rewind {
    number: u64,
    target_bytes: u64,
}

/// The rewinds that can still make somebody stale.
///
/// A view is stale if *any* rewind after its birth went below its end, so what matters is the lowest
/// target since a given moment. A rewind forgets every earlier one that went no lower, which leaves
/// numbers and targets both strictly ascending: the first entry after a birth is the lowest target
/// since. Between two neighbours lies an allocation that is still live, so the list is never longer
/// than the list of live allocations plus one.
#[derive(Debug, Default)]
pub(crate) struct RewindHistory {
    count: u64,
    lowest: Vec<Rewind>,
}

impl RewindHistory {
    /// How many rewinds there were: the birth of whatever is born now.
    #[inline]
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    #[inline]
    pub(crate) fn record(&mut self, target_bytes: u64) {
        self.count += 1;
        while self.lowest.last().is_some_and(|last| last.target_bytes >= target_bytes) {
            self.lowest.pop();
        }
        self.lowest.push(Rewind { number: self.count, target_bytes });
    }

    /// The lowest target of all rewinds after `birth` if it lies below `end_bytes`: the one that took
    /// the space away. O(log n).
    #[inline]
    pub(crate) fn taken_by(&self, birth: u64, end_bytes: u64) -> Option<u64> {
        if birth == self.count {
            return None; // the common case: nothing was rewound since
        }
        let first_later = self.lowest.partition_point(|rewind| rewind.number <= birth);
        let target_bytes = self.lowest.get(first_later)?.target_bytes;
        (target_bytes < end_bytes).then_some(target_bytes)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lowest.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_higher_rewind_does_not_hide_a_lower_one() {
        let mut history = RewindHistory::default();
        let birth = history.count();
        history.record(100);
        history.record(300);
        assert_eq!(history.taken_by(birth, 200), Some(100));
        assert_eq!(history.taken_by(birth, 100), None);
        assert_eq!(history.taken_by(birth + 1, 200), None);
        assert_eq!(history.taken_by(birth + 1, 301), Some(300));
    }

    #[test]
    fn repeating_one_rewind_keeps_one_entry() {
        let mut history = RewindHistory::default();
        for _ in 0..10_000 {
            history.record(4096);
        }
        assert_eq!(history.len(), 1);
        assert_eq!(history.count(), 10_000);
    }

    proptest! {
        #[test]
        fn agrees_with_the_plain_minimum(
            targets in prop::collection::vec(0u64..50, 0..60),
            birth in 0u64..60,
            end in 0u64..51,
        ) {
            let mut history = RewindHistory::default();
            targets.iter().for_each(|&target| history.record(target));
            let birth = birth.min(history.count());
            let lowest = targets.iter().skip(birth as usize).copied().min();
            prop_assert_eq!(history.taken_by(birth, end), lowest.filter(|&target| target < end));
        }
    }
}
