//! An engine whose loads from host memory do not end.

use pegainfer_core::engine::{EngineLimits, GenerateRequest, RequestId, StepEngine, TokenEvent};
use pegainfer_core::kv::Naming;
use pegainfer_core::kv::tiers::{Direction, Tiers, Transfer, TransferDone};
use pegainfer_core::schedule::{EngineCore, Outcome, Step, StepExecutor, TokenBudget};
use pegainfer_core::tensor::OpError;
use std::time::{Duration, Instant};

/// Draws token 1 and copies at once, except that loads hang if asked to.
struct Instantly {
    step: Option<Step>,
    done: Vec<TransferDone>,
    loads_hang: bool,
    hanging: Vec<Transfer>,
}

impl StepExecutor for Instantly {
    type State = ();

    fn useful_depth(&self) -> usize {
        1
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        self.step = Some(step.clone());
        Ok(())
    }

    fn sample(&mut self, _step: &Step) -> Result<(), OpError> {
        Ok(())
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let samples = self.step.take().unwrap().samples.len();
        Ok(Outcome { tokens: vec![1; samples], logprobs: vec![None; samples], ..Outcome::default() })
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        Ok(())
    }

    fn start_transfer(&mut self, transfer: Transfer) {
        if self.loads_hang && transfer.direction == Direction::Load {
            return self.hanging.push(transfer);
        }
        let result = Ok(transfer.blocks.iter().map(|copy| u64::from(copy.slot)).collect());
        self.done.push(TransferDone { id: transfer.id, result, took: Duration::from_micros(1) });
    }

    fn finished_transfers(&mut self) -> Vec<TransferDone> {
        std::mem::take(&mut self.done)
    }
}

fn engine() -> EngineCore<Instantly> {
    let limits = EngineLimits {
        max_model_len: 200,
        vocab_size: 1000,
        block_size: 16,
        kv_blocks: 20,
        kv_cache_dtype: "bf16",
        max_num_seqs: 4,
        eos_token_ids: vec![],
        num_speculative_tokens: None,
        image_token: None,
        unsupported: &[],
        max_loras: 0,
        hidden_size: 0,
    };
    let executor = Instantly { step: None, done: vec![], loads_hang: false, hanging: vec![] };
    let mut engine = EngineCore::new(executor, limits, TokenBudget { step: 256, mixed: 256 }, (), None);
    let pool = engine.scheduler().pool().clone();
    engine.use_tiers(Tiers::new(pool, Naming::random(), 40, 1));
    engine
}

/// Generates a token after six blocks; returns the cached tokens, and how long it took.
fn generate(engine: &mut EngineCore<Instantly>, id: u64, first: u32) -> (usize, Duration) {
    engine.add(RequestId(id), GenerateRequest::greedy((first..first + 97).collect::<Vec<u32>>(), 1));
    let (begun, mut cached) = (Instant::now(), 0);
    loop {
        let events = match engine.plan() {
            Some(admitted) => {
                engine.launch().unwrap();
                admitted
            }
            None => {
                engine.wait();
                engine.finish().unwrap()
            }
        };
        for (_, event) in events {
            match event {
                TokenEvent::Admitted { cached_tokens } => cached = cached_tokens,
                TokenEvent::Finished { .. } => return (cached, begun.elapsed()),
                _ => {}
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "the request waits for ever");
    }
}

/// Waits for all transfers.
fn settle(engine: &mut EngineCore<Instantly>) {
    while engine.has_work() {
        assert!(engine.plan().is_none());
        engine.wait();
        engine.finish().unwrap();
    }
}

#[test]
fn a_load_that_does_not_end_is_not_waited_for() {
    let mut engine = engine();
    for text in 0..5 {
        assert_eq!(generate(&mut engine, text, 100 * text as u32).0, 0);
        settle(&mut engine);
    }
    for text in 0..4 {
        assert_eq!(generate(&mut engine, 5 + text, 100 * text as u32).0, 96, "loaded");
        settle(&mut engine);
    }
    engine.executor().loads_hang = true;
    let (cached, took) = generate(&mut engine, 9, 0);
    // Loads were measured to take a microsecond: twice that, and 10 ms.
    assert!(took >= Duration::from_millis(10) && took < Duration::from_secs(5), "{cached} after {took:?}");
    assert!(cached < 96, "{cached} tokens cannot be there");
    let hanging = std::mem::take(&mut engine.executor().hanging);
    assert_eq!(hanging.len(), 1);
    engine.executor().loads_hang = false;
    hanging.into_iter().for_each(|transfer| engine.executor().start_transfer(transfer));
    settle(&mut engine);
    engine.scheduler().check_blocks().unwrap();
}
