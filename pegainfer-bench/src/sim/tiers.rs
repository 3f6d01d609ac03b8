//! Places beyond the simulated device that keep KV blocks and recurrent states, with links of a fixed rate.

use pegainfer_core::kv::tiers::{Direction, Transfer, TransferDone};
use std::time::Duration;

/// Sizes and rates of the places, in tokens and tokens per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierSizes {
    /// Tokens that fit host memory.
    pub host_tokens: usize,
    /// Rate of copies between the host and the device, each way.
    pub host_rate: f64,
    /// Tokens that fit the file; 0 without one.
    pub disk_tokens: usize,
    /// Rate of the file.
    pub disk_rate: f64,
    /// Tokens that are as large as a recurrent state; 0 for a model without. States then have half of each place.
    pub state_tokens: usize,
}

impl TierSizes {
    /// Blocks and states that a place for `tokens` tokens holds.
    pub fn slots(self, tokens: usize, block_tokens: usize) -> (usize, usize) {
        match self.state_tokens {
            0 => (tokens / block_tokens, 0),
            state_tokens => (tokens / 2 / block_tokens, tokens / 2 / state_tokens),
        }
    }
}

/// Transfers in flight. Each of the three links, to the host, to the device and to the file, carries one transfer at a
/// time.
#[derive(Debug, Clone)]
pub struct Links {
    sizes: TierSizes,
    block_tokens: usize,
    free_at: [Duration; 3],
    /// With the times of their ends.
    in_flight: Vec<(Duration, TransferDone)>,
}

impl Links {
    /// Idle links for blocks of `block_tokens` tokens.
    pub fn new(sizes: TierSizes, block_tokens: usize) -> Self {
        Self { sizes, block_tokens, free_at: [Duration::ZERO; 3], in_flight: Vec::new() }
    }

    /// Starts a transfer at `now`. Copies of the device begin when it has ended the steps before, at `device_free`.
    pub fn start(&mut self, transfer: &Transfer, now: Duration, device_free: Duration) {
        let Transfer { blocks, states, .. } = transfer;
        let tokens = (blocks.len() * self.block_tokens + states.len() * self.sizes.state_tokens) as f64;
        let (link, ready, seconds) = match transfer.direction {
            Direction::Store => (0, now.max(device_free), tokens / self.sizes.host_rate),
            Direction::Load => (1, now.max(device_free), tokens / self.sizes.host_rate),
            Direction::Write | Direction::Read => (2, now, tokens / self.sizes.disk_rate),
            Direction::Erase => (2, now, 0.0),
        };
        let begin = ready.max(self.free_at[link]);
        let took = Duration::from_secs_f64(seconds);
        self.free_at[link] = begin + took;
        // All blocks have the same bytes, none.
        let sums = vec![0; blocks.len() + states.len()];
        self.in_flight.push((begin + took, TransferDone { id: transfer.id, result: Ok(sums), took }));
    }

    /// Takes the transfers that have ended.
    pub fn finished(&mut self, now: Duration) -> Vec<TransferDone> {
        let (mut done, mut later) = (Vec::new(), Vec::new());
        for (end, transfer) in self.in_flight.drain(..) {
            if end <= now { done.push(transfer) } else { later.push((end, transfer)) }
        }
        self.in_flight = later;
        done
    }

    /// When the next transfer ends.
    pub fn next_end(&self) -> Option<Duration> {
        self.in_flight.iter().map(|(end, _)| *end).min()
    }
}
