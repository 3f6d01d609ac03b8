//! The prefix cache is emptied under a running sequence that leaves snapshots of its state.

use super::{BLOCK_TOKENS, outcome};
use pegainfer_core::engine::{GenerateRequest, RequestId};
use pegainfer_core::kv::BlockPool;
use pegainfer_core::schedule::{Scheduler, SchedulerConfig, StateConfig, StateSlots};

#[test]
fn no_snapshot_is_kept_under_a_name_that_nobody_can_find() {
    let (sequences, snapshots, block_tokens) = (2, 8, BLOCK_TOKENS);
    let slots = StateConfig { sequences, snapshots, interval: block_tokens, block_tokens, within_chunks: true };
    let config = SchedulerConfig {
        max_num_seqs: sequences,
        max_num_batched_tokens: 32,
        max_num_mixed_tokens: 32,
        speculation: None,
        eos_token_ids: vec![],
        max_loras: 0,
    };
    let mut scheduler = Scheduler::new(config, BlockPool::new(64, block_tokens), StateSlots::new(slots));
    let prompt: Vec<u32> = (0..70).collect();
    let run_step = |scheduler: &mut Scheduler<StateSlots>, reset: bool| {
        let (step, _) = scheduler.plan(false);
        if reset {
            scheduler.reset_prefix_cache();
        }
        let tokens = vec![2; step.samples.len()];
        scheduler.commit(&step, outcome(tokens));
        scheduler.state().snapshots()
    };
    scheduler.add(RequestId(0), GenerateRequest::greedy(prompt.clone(), 9));
    assert_eq!(run_step(&mut scheduler, false), 2, "a chunk of two blocks");
    assert_eq!(run_step(&mut scheduler, true), 0, "two blocks after the removed ones");
    assert_eq!((0..3).map(|_| run_step(&mut scheduler, false)).max(), Some(0), "and what follows them");
    scheduler.cancel(RequestId(0));
    assert_eq!(scheduler.state().available(), scheduler.state().total());
    // A prompt whose first block enters the index after a reset is found again.
    scheduler.add(RequestId(1), GenerateRequest::greedy(prompt, 9));
    assert_eq!(run_step(&mut scheduler, true), 2);
}
