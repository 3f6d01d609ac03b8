//! A model of tiny KV blocks: sequences that grow take a block in almost every step, and preempt each other.

use super::executor::Spoil;
use crate::kinds::Kind;
use crate::requests::Rng;
use pegainfer_core::schedule::Step;

/// A model with all state in KV blocks of one token.
pub struct Tight;

impl Kind for Tight {
    type State = ();
    const BLOCK_TOKENS: usize = 1;
    const SCALE: usize = 1;
    const BLOCKS: usize = 100;
    const DRAFTS: bool = true;
    const STEPS_PER_PREEMPTION: u64 = 30;

    fn new(_rng: &mut Rng, _sequences: usize) -> ((), Self) {
        ((), Self)
    }

    fn run(&mut self, _step: &Step, _tokens: &[u32], _prefixes: &[u64]) {}

    fn check((): &()) {}

    fn check_idle((): &()) {}
}

impl Spoil for Tight {
    fn spoil(&mut self, _step: &Step) {}
}
