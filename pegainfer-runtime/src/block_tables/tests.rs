use super::*;
use pegainfer_core::engine::{GenerateRequest, RequestId};
use pegainfer_core::isa::Isa;
use pegainfer_core::kv::BlockPool;
use pegainfer_core::readback::Readback;
use pegainfer_core::rng;
use pegainfer_core::schedule::{Outcome, Scheduler, SchedulerConfig, Step};
use std::collections::{HashMap, VecDeque};

const BLOCK_TOKENS: usize = 16;

fn cpu() -> Exec {
    Exec::cpu(Isa::best(), Some(1)).unwrap()
}

/// A scheduler of up to `blocks` blocks and `seqs` sequences, with prefill chunks of up to `tokens` tokens.
fn scheduler(seqs: usize, tokens: usize, blocks: usize) -> Scheduler {
    let config = SchedulerConfig {
        max_num_seqs: seqs,
        max_num_batched_tokens: tokens,
        max_num_mixed_tokens: tokens,
        speculation: None,
        eos_token_ids: vec![],
        max_loras: 0,
    };
    Scheduler::new(config, BlockPool::new(blocks, BLOCK_TOKENS), ())
}

fn commit(scheduler: &mut Scheduler, step: Step) {
    let (tokens, logprobs) = (vec![7; step.samples.len()], vec![None; step.samples.len()]);
    scheduler.commit(&step, Outcome { tokens, logprobs, ..Outcome::default() });
    scheduler.recycle(step);
}

impl BlockTables {
    /// Block ids that the newest step uploaded.
    fn words(&self) -> usize {
        self.changes.iter().map(|change| change.entries.len()).sum()
    }

    /// Bytes uploaded by the newest step, if they fit one upload: two tensors, as far as the longer one is filled.
    fn bytes(&self) -> usize {
        let runs: usize = self.changes.iter().map(|change| change.entries.len().div_ceil(RUN_WORDS)).sum();
        assert!(runs <= MAX_RUNS && self.words() <= MAX_WORDS);
        2 * size_of::<u32>() * self.words().max(RUN_FIELDS * runs)
    }
}

/// Sequences arrive, grow, are preempted, cancelled and end, with two steps in flight. Some steps have rows of padding;
/// some are followed by a pass over some of their rows in another order.
#[test]
fn tables_are_those_of_every_step_whatever_becomes_of_the_sequences() {
    const STRIDE: usize = 20;
    let (mut exec, mut scheduler) = (cpu(), scheduler(8, 96, 48));
    let mut tables = BlockTables::new(&mut exec, 10, STRIDE).unwrap();
    let (mut in_flight, mut ids) = (VecDeque::new(), 0..);
    let (mut uploaded, mut full, mut unchanged, mut began_again) = (0, 0, 0, 0);
    let mut blocks_of = HashMap::<RequestId, Vec<u32>>::new();
    for i in 0..30_000 {
        let draw = |what: u64, below: u64| rng::bits(what, i) % below;
        if draw(1, 6) == 0 {
            let prompt = vec![draw(2, 3) as u32; 1 + draw(3, 150) as usize];
            let id = RequestId(ids.next().unwrap());
            scheduler.add(id, GenerateRequest::greedy(prompt, 1 + draw(4, 150) as usize));
        }
        if draw(5, 100) == 0 {
            scheduler.cancel(RequestId(draw(6, ids.start + 1)));
        }
        let (step, _) = scheduler.plan(false);
        if !step.is_empty() {
            let padded = step.padded(step.rows.len() + draw(7, 3) as usize);
            tables.fill(&mut exec, &padded.block_tables).unwrap();
            assert!(tables.holds(&step.block_tables), "step {i}");
            assert_eq!(tables.tensor.rows_cols(), (padded.rows.len(), STRIDE));
            uploaded += tables.words();
            full += padded.rows.len() * STRIDE;
            unchanged += usize::from(tables.changes.is_empty());
            for (row, table) in step.rows.iter().zip(&step.block_tables) {
                let before = blocks_of.insert(row.id, table.iter().collect());
                began_again += usize::from(before.is_some_and(|before| !table.iter().take(before.len()).eq(before)));
            }
            if draw(8, 8) == 0 {
                let some = step.block_tables.iter().rev().filter(|table| table.len() % 3 != 1);
                let some: Vec<BlockIds> = some.cloned().collect();
                tables.fill(&mut exec, &some).unwrap();
                assert!(tables.holds(&some), "a pass after step {i}");
            }
            in_flight.push_back(step);
        }
        if in_flight.len() == 2 || draw(9, 2) == 0 {
            in_flight.pop_front().into_iter().for_each(|step| commit(&mut scheduler, step));
        }
    }
    println!("{uploaded} of {full} words, {unchanged} steps without, {began_again} other blocks");
    assert!(began_again > 500, "sequences began again with other blocks {began_again} times");
    assert!(unchanged > 2_000 && uploaded < full / 10, "{uploaded} of {full} words, {unchanged} steps without any");
}

/// 256 decoding sequences, one of them with 128k tokens.
#[test]
fn a_decode_step_uploads_new_blocks_whatever_the_longest_row() {
    const ROWS: usize = 256;
    const CONTEXT: usize = 1 << 17;
    let stride = CONTEXT / BLOCK_TOKENS;
    let (mut exec, mut scheduler) = (cpu(), scheduler(ROWS, 1 << 13, stride + 8 * ROWS));
    let mut tables = BlockTables::new(&mut exec, ROWS, stride).unwrap();
    let lengths = |row: usize| if row == 100 { CONTEXT - 64 } else { 40 + row % BLOCK_TOKENS };
    for row in 0..ROWS {
        scheduler.add(RequestId(row as u64), GenerateRequest::greedy(vec![row as u32; lengths(row)], 64));
    }
    let mut step = |scheduler: &mut Scheduler| {
        let (step, _) = scheduler.plan(false);
        tables.fill(&mut exec, &step.block_tables).unwrap();
        assert!(tables.holds(&step.block_tables));
        let (rows, blocks) = (step.rows.len(), step.block_tables.iter().map(BlockIds::len).sum::<usize>());
        let decodes = step.tokens.len() == rows;
        commit(scheduler, step);
        (rows, blocks, decodes, tables.words(), tables.bytes())
    };
    while !matches!(step(&mut scheduler), (ROWS, _, true, ..)) {}
    let mut words = 0;
    for _ in 0..2 * BLOCK_TOKENS {
        let (rows, _, _, new, bytes) = step(&mut scheduler);
        assert_eq!(rows, ROWS);
        assert!(bytes <= 2 * size_of::<u32>() * RUN_FIELDS * ROWS, "{bytes} bytes");
        words += new;
    }
    assert_eq!(words, 2 * ROWS, "each row has two new blocks in 32 steps");

    // All rows move up by one: each uploads its own blocks, without padding.
    scheduler.cancel(RequestId(0));
    let (rows, blocks, _, new, _) = step(&mut scheduler);
    assert_eq!((rows, new), (ROWS - 1, blocks));
    assert!(new < stride + 8 * ROWS);
}

#[test]
fn more_than_one_upload_holds_arrives() {
    let (rows, stride) = (5, MAX_WORDS / 2 + 700);
    let mut exec = cpu();
    let mut tables = BlockTables::new(&mut exec, rows, stride).unwrap();
    for seed in 0..3 {
        let ids = |row: usize| (0..stride - 100 * row).map(move |i| rng::bits(seed, (row * stride + i) as u64) as u32);
        let step: Vec<BlockIds> = (0..rows).map(|row| ids(row).collect()).collect();
        tables.fill(&mut exec, &step).unwrap();
        assert!(tables.holds(&step) && tables.words() > 2 * MAX_WORDS);
        tables.fill(&mut exec, &step).unwrap();
        assert_eq!(tables.words(), 0);
    }
    let short: Vec<BlockIds> = (0..rows).map(|row| [row as u32].into_iter().collect()).collect();
    tables.fill(&mut exec, &short).unwrap();
    assert!(tables.holds(&short) && tables.words() == rows);
}

/// The tables of a step are read back after those of the next step were uploaded.
#[test]
#[ignore = "needs a GPU"]
fn a_gpu_has_the_tables_of_every_step() {
    let (rows, stride) = (64, 3000);
    let mut exec = Exec::cuda(0, Some(2)).unwrap();
    let mut tables = BlockTables::new(&mut exec, rows, stride).unwrap();
    let mut readbacks = [0, 1].map(|_| Readback::new(&mut exec, rows * stride * size_of::<u32>()).unwrap());
    let (mut scheduler, mut before) = (scheduler(rows, 4096, 6000), Vec::<BlockIds>::new());
    for i in 0..500 {
        let draw = rng::bits(5, i);
        let length = if draw.is_multiple_of(8) { 20_000 } else { 200 };
        scheduler.add(RequestId(i), GenerateRequest::greedy(vec![i as u32; draw as usize / 8 % length + 1], 50));
        let (step, _) = scheduler.plan(false);
        tables.fill(&mut exec, &step.block_tables).unwrap();
        readbacks[i as usize % 2].start(&mut exec, &[&tables.tensor]).unwrap();
        if i > 0 {
            let arrived = readbacks[(i as usize - 1) % 2].wait().unwrap();
            let held = arrived.tensor::<u32>(0).chunks_exact(stride);
            assert_eq!(held.len(), before.len());
            for (row, (held, table)) in held.zip(&before).enumerate() {
                assert!(table.iter().eq(held.iter().copied().take(table.len())), "step {}, row {row}", i - 1);
            }
        }
        before.clone_from(&step.block_tables);
        commit(&mut scheduler, step);
    }
}
