//! Published batches: those that subscribers have not read yet, and those that they can ask for again.

use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of bytes that wait for slow subscribers. All of them read the same queue.
const WAITING_BYTES: usize = 256 << 20;
/// Bytes of batches that can be asked for; more if a dump of everything needs it.
const REPLAY_BYTES: usize = 256 << 20;

/// A published batch.
#[derive(Debug)]
pub(super) struct Batch {
    /// Its number since the sequence began.
    pub sequence: u64,
    /// Its events.
    pub payload: Vec<u8>,
}

/// The batches of one engine.
///
/// Sequence numbers begin at 0, and all batches of the sequence are kept. Before they need too much memory, the
/// sequence begins again with everything that is cached. A subscriber that asks for the batches from 0 on therefore
/// always learns the truth.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Number of times that the sequence began again.
    generation: u64,
    next_sequence: u64,
    /// Maximum number of batches of a sequence.
    max_steps: u64,
    /// Batches of the sequence; empty if nobody can ask for them.
    replay: Vec<Arc<Batch>>,
    keeps_replay: bool,
    replay_bytes: usize,
    max_replay_bytes: usize,
    /// Batches for subscribers, of any sequence.
    waiting: VecDeque<Arc<Batch>>,
    waiting_bytes: usize,
    max_waiting: usize,
    /// Number of all batches that left `waiting`.
    first: u64,
}

/// What a subscriber reads next.
#[derive(Debug)]
pub(super) struct Next {
    pub batch: Arc<Batch>,
    /// Number of batches before it that the subscriber has missed.
    pub missed: u64,
}

impl Outbox {
    /// An empty sequence of at most `max_steps` batches. At most `max_waiting` of them wait for a subscriber; 0 is no
    /// limit.
    pub fn new(max_steps: u32, max_waiting: u32, keeps_replay: bool) -> Self {
        Self {
            generation: 0,
            next_sequence: 0,
            max_steps: max_steps.into(),
            replay: Vec::new(),
            keeps_replay,
            replay_bytes: 0,
            max_replay_bytes: REPLAY_BYTES,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            max_waiting: if max_waiting == 0 { usize::MAX } else { max_waiting as usize },
            first: 0,
        }
    }

    /// True if the sequence can grow by these batches.
    pub fn fits(&self, payloads: &[Vec<u8>]) -> bool {
        let bytes: usize = payloads.iter().map(Vec::len).sum();
        self.next_sequence + payloads.len() as u64 <= self.max_steps
            && self.replay_bytes + bytes <= self.max_replay_bytes
    }

    /// Begins the sequence again with these batches.
    pub fn restart(&mut self, payloads: Vec<Vec<u8>>) {
        self.generation += 1;
        self.next_sequence = 0;
        self.replay.clear();
        self.replay_bytes = 0;
        let dump: usize = payloads.iter().map(Vec::len).sum();
        self.max_replay_bytes = REPLAY_BYTES.max(4 * dump);
        payloads.into_iter().for_each(|payload| self.push(payload));
    }

    /// Adds a batch. The oldest ones that wait for subscribers are dropped if they are too many.
    pub fn push(&mut self, payload: Vec<u8>) {
        let bytes = payload.len();
        let batch = Arc::new(Batch { sequence: self.next_sequence, payload });
        self.next_sequence += 1;
        self.replay_bytes += bytes;
        if self.keeps_replay {
            self.replay.push(batch.clone());
        }
        self.waiting.push_back(batch);
        self.waiting_bytes += bytes;
        while self.waiting.len() > self.max_waiting || (self.waiting_bytes > WAITING_BYTES && self.waiting.len() > 1) {
            let dropped = self.waiting.pop_front().map_or(0, |batch| batch.payload.len());
            self.waiting_bytes -= dropped;
            self.first += 1;
        }
    }

    /// Place of the next batch that is published, where a new subscriber begins.
    pub fn end(&self) -> u64 {
        self.first + self.waiting.len() as u64
    }

    /// The batch at `place`, or the first one after it that is left; moves `place` after it. `None` at the end.
    pub fn next(&self, place: &mut u64) -> Option<Next> {
        let at = self.first.max(*place);
        let batch = self.waiting.get(usize::try_from(at - self.first).ok()?)?.clone();
        let missed = at - *place;
        *place = at + 1;
        Some(Next { batch, missed })
    }

    /// Number of times that the sequence began again.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Batch `sequence`, as long as the sequence is that of `generation`.
    pub fn replay(&self, generation: u64, sequence: u64) -> Option<Arc<Batch>> {
        let at = usize::try_from(sequence).ok()?;
        if generation == self.generation { self.replay.get(at).cloned() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences(outbox: &Outbox, place: &mut u64) -> Vec<(u64, u64)> {
        std::iter::from_fn(|| outbox.next(place).map(|next| (next.batch.sequence, next.missed))).collect()
    }

    #[test]
    fn a_slow_subscriber_misses_the_oldest_batches() {
        let mut outbox = Outbox::new(100, 3, false);
        let (mut fast, mut slow) = (outbox.end(), outbox.end());
        for i in 0..5 {
            outbox.push(vec![i]);
            assert_eq!(sequences(&outbox, &mut fast), [(i.into(), 0)]);
        }
        assert_eq!(sequences(&outbox, &mut slow), [(2, 2), (3, 0), (4, 0)]);
        assert!(sequences(&outbox, &mut outbox.end()).is_empty());
    }

    #[test]
    fn waiting_batches_have_a_limit_in_bytes() {
        let mut outbox = Outbox::new(100, 0, false);
        (0..5).for_each(|_| outbox.push(vec![0; WAITING_BYTES / 4]));
        assert_eq!(sequences(&outbox, &mut 0), [(1, 1), (2, 0), (3, 0), (4, 0)]);
        outbox.push(vec![0; WAITING_BYTES + 1]);
        assert_eq!(sequences(&outbox, &mut 0), [(5, 5)]);
    }

    #[test]
    fn a_sequence_is_kept_from_its_first_batch_on() {
        let mut outbox = Outbox::new(3, 0, true);
        let mut place = outbox.end();
        outbox.push(vec![0]);
        assert!(outbox.fits(&[vec![1], vec![2]]) && !outbox.fits(&[vec![1], vec![2], vec![3]]));
        (1..3).for_each(|i| outbox.push(vec![i]));
        let replayed = |outbox: &Outbox, generation| -> Vec<Vec<u8>> {
            (0..).map_while(|i| outbox.replay(generation, i)).map(|batch| batch.payload.clone()).collect()
        };
        assert_eq!(replayed(&outbox, 0), [[0], [1], [2]]);
        assert!(!outbox.fits(&[vec![3]]));
        outbox.restart(vec![vec![7], vec![8]]);
        assert_eq!((replayed(&outbox, 1), outbox.generation()), (vec![vec![7], vec![8]], 1));
        assert!(replayed(&outbox, 0).is_empty(), "the first sequence is gone");
        assert_eq!(sequences(&outbox, &mut place), [(0, 0), (1, 0), (2, 0), (0, 0), (1, 0)]);
    }
}
