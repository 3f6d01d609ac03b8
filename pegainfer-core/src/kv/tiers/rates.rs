//! Whether a copy is worth its time.

use std::time::Duration;

/// Weight of a new measurement.
const WEIGHT: f64 = 0.25;
/// Factor of the expected time of a load at each refusal.
const FORGIVENESS: f64 = 0.98;
/// Smallest number of tokens of a step that says how fast prompts are computed.
const MIN_TOKENS: usize = 64;

/// Measured rates of copying and computing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rates {
    /// Seconds to load a block from the host.
    load: Option<f64>,
    /// Seconds to read a block from the disk.
    read: Option<f64>,
    /// Seconds to compute a token of a prompt.
    token: Option<f64>,
}

/// Blocks to be copied, with those that are copied before.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work {
    /// From the host to the device.
    pub load: usize,
    /// From the disk to the host.
    pub read: usize,
}

impl Work {
    /// Both.
    pub fn plus(self, other: Self) -> Self {
        Self { load: self.load + other.load, read: self.read + other.read }
    }
}

impl Rates {
    /// A transfer loaded `blocks` blocks.
    pub fn loaded(&mut self, blocks: usize, took: Duration) {
        update(&mut self.load, took.as_secs_f64() / blocks.max(1) as f64);
    }

    /// A transfer read `blocks` blocks from the disk.
    pub fn read(&mut self, blocks: usize, took: Duration) {
        update(&mut self.read, took.as_secs_f64() / blocks.max(1) as f64);
    }

    /// A step computed `tokens` tokens.
    pub fn computed(&mut self, tokens: usize, took: Duration) {
        if tokens >= MIN_TOKENS {
            update(&mut self.token, took.as_secs_f64() / tokens as f64);
        }
    }

    /// A load was refused. Once many were, one is tried again: what made loading slow may have passed.
    pub fn refused(&mut self) {
        for rate in [&mut self.load, &mut self.read] {
            *rate = rate.map(|seconds| seconds * FORGIVENESS);
        }
    }

    /// Expected time to read and load blocks; `None` if it was never measured.
    pub fn time(&self, work: Work) -> Option<Duration> {
        let of = |rate: Option<f64>, blocks: usize| if blocks == 0 { Some(0.0) } else { Some(rate? * blocks as f64) };
        Some(Duration::from_secs_f64(of(self.load, work.load)? + of(self.read, work.read)?))
    }

    /// True if that is expected to be faster than computing `tokens` tokens. What was never measured is tried.
    pub fn is_faster(&self, work: Work, tokens: usize) -> bool {
        match (self.time(work), self.token) {
            (Some(time), Some(token)) => time.as_secs_f64() < token * tokens as f64,
            _ => true,
        }
    }
}

fn update(rate: &mut Option<f64>, measured: f64) {
    *rate = Some(rate.map_or(measured, |rate| rate + WEIGHT * (measured - rate)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_way_is_taken_and_the_unknown_is_tried() {
        let (mut rates, load) = (Rates::default(), |load| Work { load, read: 0 });
        assert!(rates.is_faster(load(1), 16));
        rates.computed(1000, Duration::from_millis(20));
        assert!(rates.is_faster(load(1000), 16));
        // 100 us a block, and 20 us a token: 320 us for a block of 16.
        rates.loaded(10, Duration::from_millis(1));
        assert!(rates.is_faster(load(10), 160) && rates.is_faster(load(30), 160));
        assert!(!rates.is_faster(load(40), 160), "the queue is too long");
        assert!(rates.is_faster(Work { load: 10, read: 10 }, 160), "no read was measured");
        rates.read(10, Duration::from_millis(2));
        assert!(rates.is_faster(Work { load: 10, read: 10 }, 160));
        rates.read(10, Duration::from_millis(40));
        assert!(!rates.is_faster(Work { load: 10, read: 10 }, 160));
        // The memory has become slow.
        (0..20).for_each(|_| rates.loaded(10, Duration::from_millis(10)));
        assert!(!rates.is_faster(load(10), 160));
        rates.computed(8, Duration::from_secs(1));
        assert!(!rates.is_faster(load(10), 160), "a decode step says nothing of prompts");
        (0..100).for_each(|_| rates.refused());
        assert!(rates.is_faster(load(10), 160), "it is tried again");
    }
}
