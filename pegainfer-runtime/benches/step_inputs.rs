//! Host work of a decode step other than launches: planning, copying inputs to where a device would read them, and
//! committing tokens. Nothing is computed.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pegainfer_core::engine::{GenerateRequest, RequestId};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::kv::BlockPool;
use pegainfer_core::schedule::{Outcome, Scheduler, SchedulerConfig};
use pegainfer_runtime::{Inputs, StepSize};
use std::time::{Duration, Instant};

const BLOCK_TOKENS: usize = 16;
const ROWS: usize = 256;
/// Longest context: 8,192 blocks.
const CONTEXT: usize = 1 << 17;
/// Tokens of a prefill step.
const CHUNK: usize = 1 << 13;
/// Prompt tokens of all rows but the longest.
const PROMPT: usize = 1 << 10;
/// Decode steps before the longest row reaches [`CONTEXT`].
const DECODES: usize = 1 << 11;

/// Running sequences and the inputs of their steps.
struct World {
    scheduler: Scheduler,
    exec: Exec,
    inputs: Inputs,
    /// Decode steps so far.
    decoded: usize,
}

impl World {
    /// [`ROWS`] decoding sequences, one of them with a prompt of `longest` tokens.
    fn new(longest: usize) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: ROWS,
            max_num_batched_tokens: CHUNK,
            max_num_mixed_tokens: CHUNK,
            speculation: None,
            eos_token_ids: vec![],
            max_loras: 0,
        };
        let blocks = (CONTEXT + ROWS * (PROMPT + DECODES + CHUNK)) / BLOCK_TOKENS;
        let mut scheduler = Scheduler::new(config, BlockPool::new(blocks, BLOCK_TOKENS), ());
        for row in 0..ROWS {
            let length = if row == ROWS / 2 { longest } else { PROMPT - row % BLOCK_TOKENS };
            let prompt: Vec<u32> = (0..length).map(|i| (row + i) as u32 % 1000).collect();
            scheduler.add(RequestId(row as u64), GenerateRequest::greedy(prompt, 1 << 16));
        }
        let mut exec = Exec::cpu(Isa::best(), Some(1)).expect("a CPU");
        let size = StepSize { tokens: CHUNK, rows: ROWS, samples: ROWS, context: CONTEXT };
        let inputs = Inputs::new(&mut exec, 1000, BLOCK_TOKENS, size).expect("memory for the inputs");
        let mut world = Self { scheduler, exec, inputs, decoded: 0 };
        while world.step() < ROWS {}
        world
    }

    /// Plans, uploads and commits a step; returns its samples.
    fn step(&mut self) -> usize {
        let (step, _) = self.scheduler.plan(false);
        self.inputs.fill(&mut self.exec, &step).expect("a correct step");
        let samples = step.samples.len();
        let (tokens, logprobs) = (vec![7; samples], vec![None; samples]);
        self.scheduler.commit(&step, Outcome { tokens, logprobs, ..Outcome::default() });
        self.scheduler.recycle(step);
        samples
    }
}

fn decode_steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode step of 256 rows");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for longest in [PROMPT, CONTEXT - DECODES - ROWS] {
        let mut world = World::new(longest);
        group.bench_function(BenchmarkId::new("longest prompt", longest), |b| {
            b.iter_custom(|iterations| {
                let mut time = Duration::ZERO;
                for _ in 0..iterations {
                    if world.decoded == DECODES {
                        world = World::new(longest);
                    }
                    world.decoded += 1;
                    let start = Instant::now();
                    world.step();
                    time += start.elapsed();
                }
                time
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decode_steps);
criterion_main!(benches);
