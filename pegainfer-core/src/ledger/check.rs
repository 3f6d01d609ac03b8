//! Limits of a ledger's numbers: the header sets the size of pools, and sums of loads and times must not overflow.

use super::file::{Header, Ledger};
use super::load::StepLoad;
use crate::engine::options::{check_step, max_pool_blocks};
use crate::schedule::StateConfig;

/// Maximum number of state snapshots.
const MAX_SNAPSHOTS: usize = 1 << 16;
/// Longest context, tokens.
const MAX_CONTEXT: usize = 1 << 30;
/// Maximum number of steps in flight.
const MAX_DEPTH: usize = 64;
/// Maximum number of ranks that share a model.
const MAX_RANKS: usize = 1 << 16;
/// Maximum number of KV blocks: each costs a simulation some bytes.
const MAX_BLOCKS: usize = 1 << 24;
/// Maximum number of tokens or sequences of a step, and of calls or runs.
const MAX_COUNT: usize = 1 << 40;
/// Maximum number of query-key pairs of a step.
const MAX_PAIRS: u64 = 1 << 60;
/// Longest time, microseconds: three hours.
const MAX_US: f64 = 1e10;

impl Header {
    /// Checks that an engine can have these sizes. The error is a clause that names the number.
    pub fn check(&self) -> Result<(), String> {
        let blocks = MAX_BLOCKS.min(max_pool_blocks(self.block_size.max(1)) as usize);
        for (name, value, most) in [
            ("block_size", self.block_size, MAX_CONTEXT),
            ("kv_blocks", self.kv_blocks, blocks),
            ("max_model_len", self.max_model_len, MAX_CONTEXT),
            ("vocab_size", self.vocab_size, u32::MAX as usize),
            ("depth", self.depth, MAX_DEPTH),
            ("ranks", self.ranks, MAX_RANKS),
            ("max_num_mixed_tokens", self.max_num_mixed_tokens, MAX_COUNT),
        ] {
            in_range(name, value, 1, most)?;
        }
        check_step(self.max_num_seqs, self.max_num_batched_tokens)?;
        let Some(StateConfig { snapshots, interval, .. }) = self.state else { return Ok(()) };
        in_range("snapshots", snapshots, 0, MAX_SNAPSHOTS)?;
        in_range("interval", interval, 0, MAX_CONTEXT)?;
        match interval.is_multiple_of(self.block_size) {
            true => Ok(()),
            false => Err(format!("interval is {interval}, and must be a multiple of block_size {}", self.block_size)),
        }
    }
}

impl Ledger {
    /// Checks every number. The error is a clause that names the first wrong one.
    pub(super) fn check(&self) -> Result<(), String> {
        self.header.check()?;
        is_time("step_us", self.host.step_us)?;
        is_time("row_us", self.host.row_us)?;
        for line in &self.steps {
            is_load(&line.load)?;
            is_time("us", line.us)?;
            is_time("spread", line.spread)?;
            in_range("runs", line.runs, 0, MAX_COUNT)?;
        }
        for line in &self.ops {
            is_load(&line.load)?;
            is_time("us", line.us)?;
            in_range("calls", line.calls, 0, MAX_COUNT)?;
        }
        for line in &self.kernels {
            is_load(&line.load)?;
            for (name, us) in [("us", line.us), ("idle_us", line.idle_us), ("own_us", line.own_us)] {
                is_time(name, us)?;
            }
            in_range("calls", line.calls, 0, MAX_COUNT)?;
        }
        for line in self.anchor.iter().flat_map(|anchor| &anchor.steps) {
            is_load(&line.load)?;
            is_time("us", line.us)?;
            is_time("ledger_us", line.ledger_us)?;
        }
        Ok(())
    }
}

fn in_range(name: &str, value: usize, min: usize, max: usize) -> Result<(), String> {
    match (min..=max).contains(&value) {
        true => Ok(()),
        false => Err(format!("{name} is {value}, and must be from {min} to {max}")),
    }
}

fn is_time(name: &str, us: f64) -> Result<(), String> {
    // NaN is in no range.
    match (0.0..=MAX_US).contains(&us) {
        true => Ok(()),
        false => Err(format!("{name} is {us}, and must be from 0 to {MAX_US:e}")),
    }
}

fn is_load(load: &StepLoad) -> Result<(), String> {
    for (name, value) in [
        ("decode_rows", load.decode_rows),
        ("decode_kv", load.decode_kv),
        ("prefill_rows", load.prefill_rows),
        ("prefill_tokens", load.prefill_tokens),
    ] {
        in_range(name, value, 0, MAX_COUNT)?;
    }
    match load.pairs <= MAX_PAIRS {
        true => Ok(()),
        false => Err(format!("pairs is {}, and must be from 0 to {MAX_PAIRS}", load.pairs)),
    }
}

#[cfg(test)]
mod tests {
    use crate::ledger::Ledger;

    /// Reads a ledger with another number in `field`.
    fn read(field: &str, number: &str) -> Result<Ledger, String> {
        let text = include_str!("../../../ledgers/h200-qwen35-4b.jsonl");
        let (before, after) = text.split_once(&format!("\"{field}\":")).unwrap_or_else(|| panic!("no {field}"));
        let rest = &after[after.find([',', '}']).unwrap()..];
        Ledger::read(format!("{before}\"{field}\":{number}{rest}").as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_that_no_engine_has_are_refused_by_name() {
        const HUGE: &str = "4611686018427387904";
        for field in ["kv_blocks", "block_size", "max_model_len", "vocab_size", "depth", "max_num_mixed_tokens"] {
            for number in ["0", HUGE] {
                let error = read(field, number).unwrap_err();
                assert!(error.contains(&format!("{field} is {number}, and must be")), "{error}");
                assert!(error.ends_with("write one with pegainfer ledger"), "{error}");
            }
        }
        for field in ["max_num_seqs", "max_num_batched_tokens"] {
            for number in ["0", HUGE] {
                let error = read(field, number).unwrap_err();
                assert!(error.contains(&format!("--{} is {number}", field.replace('_', "-"))), "{error}");
            }
        }
        for field in ["snapshots", "interval", "decode_rows", "decode_kv", "runs", "pairs", "calls"] {
            let error = read(field, HUGE).unwrap_err();
            assert!(error.contains(&format!("{field} is {HUGE}, and must be")), "{error}");
        }
        for field in ["step_us", "row_us", "us", "spread"] {
            for number in ["1e308", "-1"] {
                let error = read(field, number).unwrap_err();
                assert!(error.contains(&format!("{field} is ")) && error.contains("and must be"), "{error}");
            }
        }
        assert!(read("interval", "17").unwrap_err().contains("a multiple of block_size"));
        read("step_us", "1.5").unwrap();
    }
}
