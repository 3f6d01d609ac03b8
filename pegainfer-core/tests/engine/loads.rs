//! An engine with copies in host memory: loads that do not end, and loads for which there is no place yet.

use pegainfer_core::engine::{EngineLimits, GenerateRequest, RequestId, StepEngine, TokenEvent};
use pegainfer_core::kv::Naming;
use pegainfer_core::kv::tiers::{Direction, Tiers, Transfer, TransferDone};
use pegainfer_core::schedule::{EngineCore, Outcome, Step, StepExecutor, TokenBudget};
use pegainfer_core::tensor::OpError;
use std::collections::HashMap;
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

/// The prompt of a text: six blocks and a token.
fn prompt(text: u32) -> Vec<u32> {
    (100 * text..100 * text + 97).collect()
}

/// Generates a token after the prompt of a text; returns the cached tokens, and how long it took.
fn generate(engine: &mut EngineCore<Instantly>, id: u64, text: u32) -> (usize, Duration) {
    let begun = Instant::now();
    engine.add(RequestId(id), GenerateRequest::greedy(prompt(text), 1));
    (run(engine, 1)[&RequestId(id)], begun.elapsed())
}

/// Runs until so many requests have ended; the cached tokens of each.
fn run(engine: &mut EngineCore<Instantly>, mut requests: usize) -> HashMap<RequestId, usize> {
    let (begun, mut cached) = (Instant::now(), HashMap::new());
    while requests > 0 {
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
        for (id, event) in events {
            match event {
                TokenEvent::Admitted { cached_tokens } => drop(cached.insert(id, cached_tokens)),
                TokenEvent::Finished { .. } => requests -= 1,
                _ => {}
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "the request waits for ever");
    }
    cached
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
        assert_eq!(generate(&mut engine, u64::from(text), text).0, 0);
        settle(&mut engine);
    }
    for text in 0..4 {
        assert_eq!(generate(&mut engine, 5 + u64::from(text), text).0, 96, "loaded");
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

#[test]
fn blocks_are_loaded_once_there_is_a_place_for_them() {
    let mut engine = engine();
    for text in 0..5 {
        assert_eq!(generate(&mut engine, u64::from(text), text).0, 0);
        settle(&mut engine);
    }
    // Two requests take 17 blocks of 20, and then two more. The next one has to wait for one of them.
    for (id, len, tokens) in [(5, 160, 30), (6, 97, 30)] {
        engine
            .add(RequestId(id), GenerateRequest::greedy((1000 * id as u32..).take(len).collect::<Vec<u32>>(), tokens));
    }
    engine.add(RequestId(7), GenerateRequest::greedy(prompt(3), 1));
    let cached = run(&mut engine, 3);
    assert_eq!(cached[&RequestId(7)], 96, "its blocks are on the host: {cached:?}");
    settle(&mut engine);
    engine.scheduler().check_blocks().unwrap();
}
