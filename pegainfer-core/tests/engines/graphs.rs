//! Padded decode steps and CUDA graphs give the same results as unpadded steps launched one by one.

use super::invariance::same;
use super::mixes;
use super::{Fixture, Target, best, greedy, run, with_logprobs};
use pegainfer_core::engine::{GenerateRequest, MAX_LOGPROBS, StepEngine};
use pegainfer_core::ledger::StepKind;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::{EngineCore, Graphs, Outcome, PLACEHOLDER, SequenceState, Step, StepExecutor};

/// Rows of the largest step. Steps of 1 to this many rows cover every number of padded rows of these graph sizes.
pub const ROWS: usize = 40;
/// Decode steps of a chain. The first one of a size may be captured, the others are replays.
const DECODES: usize = 6;
/// Prompt tokens of the first row, which is the longest. All steps of a chain have equally many blocks per row, and no
/// context exceeds 64 tokens, where kernels of older GPUs would split a row differently than in the captured step.
const LONGEST: usize = 33;

/// Step type of `E`.
type StepOf<E> = Step<<<E as StepExecutor>::State as SequenceState>::Row>;

/// Functions of a model that the tests need.
pub struct Model<E: StepExecutor> {
    /// See `Step::ragged`.
    pub ragged: fn(&[(usize, usize)]) -> StepOf<E>,
    /// See `Step::padded`.
    pub padded: fn(&StepOf<E>, usize) -> StepOf<E>,
    /// Graphs that were launched so far.
    pub replays: fn(&E) -> u64,
}

/// Runs steps of 1 to [`ROWS`] rows, greedy and sampled, each with placeholder ids for the tokens of the previous step,
/// with one and with two steps in flight. `load(graphs)` gives an engine that may or may not replay graphs.
///
/// On a GPU one engine replays graphs, and the other runs the padded steps launch by launch: the same kernels on the
/// same shapes, so all ids must be equal. So must the bits of log-probabilities, which depend on all keys, values and
/// states that the steps wrote. On a CPU one engine runs the padded steps and the other the original ones: padded rows
/// must not change a bit of the others.
pub fn graph_equals_eager<E: StepExecutor>(load: impl Fn(bool) -> EngineCore<E>, model: &Model<E>) {
    let target = best();
    let (mut graphs, mut eager) = (load(true), load(false));
    let (graphs, eager) = (graphs.executor(), eager.executor());
    let before = (model.replays)(graphs);
    for rows in 1..=ROWS {
        let size = Graphs::<usize>::new(ROWS).size(&(model.ragged)(&vec![(1, 1); rows])).unwrap();
        let mut steps = chain(model, rows);
        let mut reported = steps.pop().unwrap();
        reported.samples.iter_mut().for_each(|sample| sample.logprobs = Some(MAX_LOGPROBS));
        let pad = |step: &StepOf<E>| (model.padded)(step, size);
        let padded: Vec<_> = steps[..1].iter().cloned().chain(steps[1..].iter().map(pad)).collect();
        let (given, reference) = match target {
            Target::Cuda => ((&steps, reported.clone()), &padded),
            Target::Cpu(_) => ((&padded, pad(&reported)), &steps),
        };
        let depth = 1 + rows % 2;
        let found = outcomes(graphs, given.0, depth).into_iter().chain(outcomes(graphs, &[given.1], 1));
        let expected = outcomes(eager, reference, depth).into_iter().chain(outcomes(eager, &[reported], 1));
        for (i, (found, expected)) in found.zip(expected).enumerate() {
            let what = format!("{target}, {rows} rows, step {i}");
            assert_eq!(found.tokens[..rows], expected.tokens[..rows], "{what}");
            assert!(found.logprobs[..rows] == expected.logprobs[..rows], "{what}: log-probabilities differ");
        }
    }
    let launched = (model.replays)(graphs) - before;
    println!("{target}: {launched} graphs were launched");
    let least = if target == Target::Cuda { ROWS * (DECODES - 1) } else { 0 };
    assert!(launched >= least as u64, "graphs were launched {launched} times");
    assert_eq!((model.replays)(eager), 0);
}

/// Prompts of `rows` rows in one step, then [`DECODES`] + 1 steps of one token each, whose input is the token of the
/// previous step.
///
/// At most 96 prompt tokens, because two engines may run different cuBLASLt algorithms for larger GEMMs.
fn chain<E: StepExecutor>(model: &Model<E>, rows: usize) -> Vec<StepOf<E>> {
    let spread = if rows <= 8 { 20 } else { 2 };
    let length = |b: usize| if b == 0 { LONGEST } else { 1 + 7 * b % spread };
    let step = |decoded: usize| {
        let row = |b: usize| if decoded == 0 { (length(b), length(b)) } else { (1, length(b) + decoded) };
        let mut step = (model.ragged)(&(0..rows).map(row).collect::<Vec<_>>());
        if decoded > 0 {
            step.tokens = (0..rows as u32).map(|b| PLACEHOLDER | b).collect();
        }
        for (b, sample) in step.samples.iter_mut().enumerate().filter(|(b, _)| b % 3 == 1) {
            sample.params = SamplingParams::new(0.9, 40, 0.95, 0.01, b as u64).unwrap();
        }
        step
    };
    let steps: Vec<_> = (0..DECODES + 2).map(step).collect();
    assert!(steps[0].tokens.len() <= 96 && steps.iter().all(|step| step.max_blocks() == steps[0].max_blocks()));
    steps
}

/// Outcomes of `steps` with `depth` of them in flight.
fn outcomes<E: StepExecutor>(executor: &mut E, steps: &[StepOf<E>], depth: usize) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        executor.launch(step).unwrap();
        executor.sample(step).unwrap();
        if i + 1 >= depth {
            outcomes.push(executor.finish().unwrap());
        }
    }
    outcomes.extend((outcomes.len()..steps.len()).map(|_| executor.finish().unwrap()));
    outcomes
}

/// Runs [`ROWS`] requests that end one after another through the scheduler, so that decode steps of every number of
/// rows occur. Without log-probabilities the results equal those of an engine without graphs with them, with one or two
/// steps in flight.
pub fn served_text_is_that_without_graphs<E: StepExecutor>(fixture: &Fixture, load: impl Fn(bool) -> EngineCore<E>) {
    let request = |i: usize| {
        let request = greedy(&fixture.cases[i % fixture.cases.len()].prompt_ids, 2 + 2 * i);
        let sampling = SamplingParams::new(0.9, 40, 0.95, 0.01, i as u64).unwrap();
        if i % 3 == 1 { GenerateRequest { sampling, ..request } } else { request }
    };
    let requests: Vec<_> = (0..ROWS).map(request).collect();
    let reported: Vec<_> = requests.iter().cloned().map(with_logprobs).collect();
    let expected = run(&mut load(false), &reported);
    for depth in [1, 2] {
        let mut engine = load(true);
        engine.set_depth(depth);
        same(&format!("graphs, depth {depth}"), best(), &requests, &expected, &run(&mut engine, &requests));
    }
}

/// Checks that all decode steps of a loaded engine replay graphs from the first one on, whatever their samples request:
/// requests with every sampling option, alone and together. On a CPU no step does; tests/engine/faults checks which
/// steps would.
pub fn no_decode_step_runs_without_a_graph<E: StepExecutor>(mut engine: EngineCore<E>, replays: fn(&E) -> u64) {
    let log = engine.step_log().unwrap();
    let decodes = || log.totals().iter().find(|(kind, _)| *kind == StepKind::Decode).map_or(0, |(_, all)| all.count());
    let requests = mixes::draw(1, ROWS);
    let before = (decodes(), replays(engine.executor()));
    // One prompt at a time, so that no chunk of a prompt is cut to a single token.
    requests.iter().take(8).for_each(|request| drop(run(&mut engine, std::slice::from_ref(request))));
    run(&mut engine, &requests);
    let (decodes, replayed) = (decodes() - before.0, replays(engine.executor()) - before.1);
    println!("{decodes} decode steps, {replayed} of them as graphs");
    assert!(decodes > 50, "few steps decode");
    assert_eq!(replayed, if best() == Target::Cuda { decodes } else { 0 });
}
