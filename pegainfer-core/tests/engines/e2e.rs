//! An engine against reference outputs.
//!
//! The reference is f32 and the engine is bf16. The engine may choose another token only where the reference's top two
//! are closer than the fixture's margin. Its log-probabilities of the reference's five most likely tokens must stay
//! within the fixture's bounds, individually and on average. Greedy texts are compared without log-probabilities first,
//! because a GPU then replays CUDA graphs.

use super::{Case, Fixture, Limits, Output, Target, best, greedy, run, targets, with_logprobs};
use pegainfer_core::engine::{
    EngineConfig, EngineHandle, FinishReason, GenerateRequest, MAX_LOGPROBS, StepEngine, TokenEvent, TokenStream,
};
use pegainfer_core::schedule::{EngineCore, StepExecutor};
use std::time::{Duration, Instant};

/// Log-probabilities compared at each position.
const TOP: usize = 5;

/// Checks each step after the reference's own tokens (cheap thanks to the prefix cache).
///
/// `steps`: number of steps per case on a target. Fewer than `min_steps` in all would test nothing.
pub fn every_step_agrees<E: StepEngine>(
    fixture: &Fixture,
    load: impl Fn(Target) -> E,
    steps: impl Fn(Target, &Case) -> usize,
    min_steps: usize,
) {
    for target in targets() {
        let mut engine = load(target);
        let mut tally = Tally { target, limits: fixture.limits, steps: 0, close: 0, errors: Vec::new() };
        for case in &fixture.cases {
            for i in 0..steps(target, case) {
                tally.step(&mut engine, case, i);
            }
        }
        tally.check(min_steps);
    }
}

/// Results of the steps of all cases.
struct Tally {
    target: Target,
    limits: Limits,
    steps: usize,
    /// Number of steps at which the reference is undecided.
    close: usize,
    /// Errors of log-probabilities, in nats.
    errors: Vec<f64>,
}

impl Tally {
    fn step(&mut self, engine: &mut impl StepEngine, case: &Case, i: usize) {
        let prefix = [&case.prompt_ids, &case.greedy_ids[..i]].concat();
        // The engine's top tokens must contain the reference's top five, in any order.
        let request = GenerateRequest { logprobs: Some(MAX_LOGPROBS), ..greedy(&prefix, 1) };
        let token = run(engine, &[request]).remove(0).tokens.remove(0);
        self.steps += 1;
        if case.margins[i] > self.limits.margin {
            assert_eq!(token.id, case.greedy_ids[i], "{}, {}, step {i}", self.target, case.name);
        } else {
            self.close += 1;
        }
        let Some(top) = case.top20.get(i) else { return };
        let ours = token.logprobs.unwrap().top;
        for (id, reference) in top.ids.iter().zip(&top.logprobs).take(TOP) {
            let our = ours.iter().find(|(ours, _)| ours == id);
            let our = our.unwrap_or_else(|| panic!("{}, step {i}: token {id} is not near the top", case.name));
            self.errors.push((f64::from(our.1) - reference).abs());
        }
    }

    fn check(&self, min_steps: usize) {
        let Self { target, limits, steps, close, .. } = *self;
        let max = self.errors.iter().copied().fold(0.0, f64::max);
        let mean = self.errors.iter().sum::<f64>() / self.errors.len() as f64;
        println!(
            "{target}: {steps} steps, {close} within the margin; log-probability error mean {mean:.4}, max {max:.4}"
        );
        assert!(steps >= min_steps && (close as f64) < steps as f64 * limits.close, "the fixture tests nothing");
        assert!(max <= limits.max && mean <= limits.mean, "{target}: mean {mean}, max {max}");
    }
}

/// Compares the engine's greedy text up to the point where the reference is undecided, without and with
/// log-probabilities: all requests together, and each alone, where a GPU may decode with other kernels.
pub fn greedy_text_equals_the_reference<E: StepEngine>(fixture: &Fixture, load: impl Fn(Target) -> E) {
    let plain: Vec<_> = fixture.cases.iter().map(|c| greedy(&c.prompt_ids, c.greedy_ids.len())).collect();
    let reported = plain.iter().cloned().map(with_logprobs).collect();
    for requests in [plain, reported] {
        for rows in [requests.len(), 1] {
            let mut engine = load(best());
            let outputs = requests.chunks(rows).flat_map(|requests| run(&mut engine, requests));
            let compare = |(case, output)| equals_the_reference(&format!("{rows} rows"), fixture.limits, case, output);
            let compared: usize = fixture.cases.iter().zip(outputs).map(compare).sum();
            assert!(compared >= 100, "only {compared} tokens were compared");
        }
    }
}

/// Compares one greedy text, and its log-probabilities if it has them. Returns the number of compared tokens, before
/// the first at which the reference is undecided.
fn equals_the_reference(what: &str, limits: Limits, case: &Case, output: Output) -> usize {
    let decided = case.margins.iter().position(|&m| m <= limits.margin).unwrap_or(case.margins.len());
    assert_eq!(output.ids()[..decided], case.greedy_ids[..decided], "{what}, {}", case.name);
    assert_eq!(output.end.unwrap().0, FinishReason::Length);
    for (i, (token, top)) in output.tokens[..decided].iter().zip(&case.top20).enumerate() {
        let Some(logprobs) = &token.logprobs else { continue };
        let error = (f64::from(logprobs.logprob) - top.logprobs[0]).abs();
        assert!(error <= limits.max, "{what}, {}, step {i}: off by {error}", case.name);
    }
    decided
}

/// Checks through the engine thread, with one or two steps in flight, that end-of-text ends a request and is counted,
/// and that cancelled requests leave no trace.
pub fn stops_at_end_of_text_and_forgets_cancelled_requests<E: StepExecutor>(
    fixture: &Fixture,
    load: impl Fn(Target) -> EngineCore<E>,
) {
    for depth in [1, 2] {
        let mut engine = load(best());
        engine.set_depth(depth);
        let eos = engine.limits().eos_token_ids;
        let handle = EngineHandle::spawn(engine, EngineConfig::default()).unwrap();
        let submit = |case: &Case| {
            let request = GenerateRequest { ignore_eos: false, ..greedy(&case.prompt_ids, 200) };
            let mut abandoned = handle.submit(request.clone()).unwrap();
            assert!(matches!(abandoned.blocking_recv(), Some(TokenEvent::Admitted { .. })));
            drop(abandoned);
            handle.submit(request).unwrap()
        };
        // All run at the same time.
        let streams: Vec<TokenStream> = fixture.cases.iter().map(submit).collect();
        let ends = streams.into_iter().zip(&fixture.cases);
        let stopped: usize = ends.map(|(stream, case)| usize::from(reaches_end_of_text(stream, case, &eos))).sum();
        assert!(stopped >= fixture.cases.len() / 2, "only {stopped} cases reached their end-of-text");
        let deadline = Instant::now() + Duration::from_secs(20);
        while handle.stats().running + handle.stats().waiting > 0 {
            assert!(Instant::now() < deadline, "a cancelled request goes on: {:?}", handle.stats());
            std::thread::yield_now();
        }
        assert_eq!(handle.stats().kv_blocks_free, handle.stats().kv_blocks_total);
        assert!(handle.is_healthy());
    }
}

/// Reads a stream to its end. True if end-of-text ended it; it is then the only stop token.
fn reaches_end_of_text(mut stream: TokenStream, case: &Case, eos: &[u32]) -> bool {
    let (mut tokens, mut stopped) = (Vec::new(), false);
    while let Some(event) = stream.blocking_recv() {
        match event {
            TokenEvent::Token(token) => tokens.push(token),
            TokenEvent::Finished { reason, usage } => {
                assert_eq!(usage.completion_tokens, tokens.len());
                assert_eq!(usage.prompt_tokens, case.prompt_ids.len());
                if let FinishReason::Stop(id) = reason {
                    assert!(eos.contains(&id) && tokens.last().unwrap().is_stop);
                    stopped = true;
                }
            }
            _ => {}
        }
    }
    assert!(tokens.iter().rev().skip(1).all(|t| !t.is_stop));
    stopped
}
