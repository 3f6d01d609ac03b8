//! The real engine against reference outputs.
//!
//! The rule, stated once: the reference is f32, the engine is bf16, so the engine may choose another token only where
//! the reference's top two are closer than the fixture's margin; and its log-probabilities of the reference's five most
//! likely tokens stay within the fixture's bounds, each and on average. transformers in bf16 needs 0.063 and 0.26 for the
//! bundled model.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_core::engine::{
    EngineConfig, EngineHandle, FinishReason, GenerateRequest, MAX_LOGPROBS, StepEngine, TokenEvent,
};
use support::{Case, best, engine, fixture, greedy, options, run, targets};

/// Log-probabilities compared at each position.
const TOP: usize = 5;

/// Every step of every case, each with the reference's own tokens before it (the prefix cache makes that cheap). On slower
/// instruction sets, those steps of which log-probabilities are known.
#[test]
fn every_step_agrees_with_the_reference() {
    let fixture = fixture();
    let limits = fixture.limits;
    for target in targets() {
        let mut engine = engine(target, &options());
        let (mut steps, mut close, mut errors) = (0, 0, Vec::new());
        for case in &fixture.cases {
            let last = if target == best() { case.greedy_ids.len() } else { case.top20.len() };
            let prefixes: Vec<Vec<u32>> =
                (0..last).map(|i| [&case.prompt_ids, &case.greedy_ids[..i]].concat()).collect();
            for (i, prefix) in prefixes.iter().enumerate() {
                // The engine's top must contain the reference's top five, in whatever order.
                let request = GenerateRequest { logprobs: Some(MAX_LOGPROBS), ..greedy(prefix, 1) };
                let output = run(&mut engine, &[request]).remove(0);
                steps += 1;
                let token = &output.tokens[0];
                if case.margins[i] > limits.margin {
                    assert_eq!(token.id, case.greedy_ids[i], "{target}, {}, step {i}", case.name);
                } else {
                    close += 1;
                }
                let ours = &token.logprobs.as_ref().unwrap().top;
                if let Some(top) = case.top20.get(i) {
                    for (id, reference) in top.ids.iter().zip(&top.logprobs).take(TOP) {
                        let our = ours.iter().find(|(ours, _)| ours == id);
                        let our =
                            our.unwrap_or_else(|| panic!("{}, step {i}: token {id} is not near the top", case.name));
                        errors.push((f64::from(our.1) - reference).abs());
                    }
                }
            }
        }
        let max = errors.iter().copied().fold(0.0, f64::max);
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        println!(
            "{target}: {steps} steps, {close} within the margin; log-probability error mean {mean:.4}, max {max:.4}"
        );
        assert!(steps >= 200 && f64::from(close) < f64::from(steps) * limits.close, "the fixture tests nothing");
        assert!(max <= limits.max && mean <= limits.mean, "{target}: mean {mean}, max {max}");
    }
}

/// The engine's own greedy text, and its log-probabilities, up to where the reference is undecided: all requests together,
/// and each alone, where a GPU may decode with other kernels.
#[test]
fn greedy_text_equals_the_reference_up_to_its_first_close_call() {
    let fixture = fixture();
    let limits = fixture.limits;
    let decided = |case: &Case| case.margins.iter().position(|&m| m <= limits.margin).unwrap_or(case.margins.len());
    let requests: Vec<_> = fixture.cases.iter().map(|c| greedy(&c.prompt_ids, c.greedy_ids.len())).collect();
    for rows in [requests.len(), 1] {
        let mut engine = engine(best(), &options());
        let outputs = requests.chunks(rows).flat_map(|requests| run(&mut engine, requests));
        let mut compared = 0;
        for (case, output) in fixture.cases.iter().zip(outputs) {
            let n = decided(case);
            assert_eq!(output.ids()[..n], case.greedy_ids[..n], "{rows} rows, {}", case.name);
            assert_eq!(output.end.unwrap().0, FinishReason::Length);
            for (i, (token, top)) in output.tokens[..n].iter().zip(&case.top20).enumerate() {
                let error = (f64::from(token.logprobs.as_ref().unwrap().logprob) - top.logprobs[0]).abs();
                assert!(error <= limits.max, "{rows} rows, {}, step {i}: off by {error}", case.name);
            }
            compared += n;
        }
        assert!(compared >= 100, "only {compared} tokens were compared");
    }
}

/// Through the engine thread: end-of-text ends a request and is counted, cancelled requests leave nothing behind.
#[test]
fn the_engine_thread_stops_at_end_of_text_and_forgets_cancelled_requests() {
    for depth in [1, 2] {
        stops_and_forgets(depth);
    }
}

fn stops_and_forgets(depth: usize) {
    let fixture = fixture();
    let mut engine = engine(best(), &options());
    engine.set_depth(depth);
    let eos = engine.limits().eos_token_ids;
    let handle = EngineHandle::spawn(engine, EngineConfig::default()).unwrap();
    let total = handle.stats().kv_blocks_total;
    let mut stopped = 0;
    for case in &fixture.cases {
        let mut request = greedy(&case.prompt_ids, 200);
        request.ignore_eos = false;
        let mut abandoned = handle.submit(request.clone()).unwrap();
        assert!(matches!(abandoned.blocking_recv(), Some(TokenEvent::Admitted { .. })));
        drop(abandoned);
        let mut stream = handle.submit(request).unwrap();
        let mut tokens = Vec::new();
        while let Some(event) = stream.blocking_recv() {
            match event {
                TokenEvent::Token(token) => tokens.push(token),
                TokenEvent::Finished { reason, usage } => {
                    assert_eq!(usage.completion_tokens, tokens.len());
                    assert_eq!(usage.prompt_tokens, case.prompt_ids.len());
                    if let FinishReason::Stop(id) = reason {
                        assert!(eos.contains(&id) && tokens.last().unwrap().is_stop);
                        stopped += 1;
                    }
                }
                _ => {}
            }
        }
        assert!(tokens.iter().rev().skip(1).all(|t| !t.is_stop));
    }
    assert!(stopped >= fixture.cases.len() / 2, "only {stopped} cases reached their end-of-text");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while handle.stats().running + handle.stats().waiting > 0 {
        assert!(std::time::Instant::now() < deadline, "a cancelled request goes on: {:?}", handle.stats());
        std::thread::yield_now();
    }
    assert_eq!(handle.stats().kv_blocks_free, total);
    assert!(handle.is_healthy());
}
