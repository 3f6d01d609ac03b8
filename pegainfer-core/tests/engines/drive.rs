//! A driver of engines without threads.

use super::Target;
use pegainfer_core::engine::{
    FinishReason, GenerateRequest, RequestId, StepEngine, TokenEvent, TokenLogprobs, TokenOut, Usage,
};
use pegainfer_core::schedule::{EngineCore, StepExecutor};
use std::collections::HashMap;

/// A greedy request without log-probabilities: on a GPU its decode steps replay CUDA graphs.
pub fn greedy(prompt: &[u32], max_tokens: usize) -> GenerateRequest {
    GenerateRequest { ignore_eos: true, ..GenerateRequest::greedy(prompt.to_vec(), max_tokens) }
}

/// `request` with the log-probabilities of each token and of the five most likely ones. Steps with them run without
/// graphs.
pub fn with_logprobs(request: GenerateRequest) -> GenerateRequest {
    GenerateRequest { logprobs: Some(5), ..request }
}

/// Result of one request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    pub prompt: Option<Vec<TokenLogprobs>>,
    pub vector: Option<Box<[f32]>>,
    pub tokens: Vec<TokenOut>,
    pub end: Option<(FinishReason, Usage)>,
}

impl Output {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }
    /// Tokens and the bits of every log-probability: all that must not depend on scheduling.
    pub fn bits(&self) -> Vec<Vec<u32>> {
        let bits = |t: &TokenOut| {
            let logprobs = t.logprobs.iter().flat_map(|l| {
                let top = l.top.iter().flat_map(|(id, p)| [*id, p.to_bits()]);
                [l.logprob.to_bits(), l.rank].into_iter().chain(top)
            });
            std::iter::once(t.id).chain(logprobs).collect()
        };
        self.tokens.iter().map(bits).collect()
    }
}

/// Runs all requests to their end, submitted at once.
pub fn run(engine: &mut impl StepEngine, requests: &[GenerateRequest]) -> Vec<Output> {
    let at_once: Vec<_> = requests.iter().map(|request| (0, request.clone())).collect();
    run_arriving(engine, &at_once)
}

/// Runs requests to their end. Each is submitted once the given number of steps was launched, or earlier if nothing
/// else is left to do.
pub fn run_arriving(engine: &mut impl StepEngine, requests: &[(usize, GenerateRequest)]) -> Vec<Output> {
    let mut outputs: HashMap<RequestId, Output> = HashMap::new();
    let mut waiting: Vec<usize> = (0..requests.len()).collect();
    // Requests of one step keep their order; the next one is the last.
    waiting.sort_by_key(|i| std::cmp::Reverse((requests[*i].0, *i)));
    let mut launched = 0;
    while engine.has_work() || !waiting.is_empty() {
        while let Some(i) = waiting.pop_if(|i| requests[*i].0 <= launched || !engine.has_work()) {
            let request = &requests[i].1;
            engine.limits().check(request).unwrap();
            outputs.insert(RequestId(i as u64), Output::default());
            engine.add(RequestId(i as u64), request.clone());
        }
        let events = match engine.plan() {
            Some(admitted) => {
                engine.launch().unwrap();
                launched += 1;
                admitted
            }
            None => {
                engine.wait();
                engine.finish().unwrap()
            }
        };
        for (id, event) in events {
            let output = outputs.get_mut(&id).unwrap();
            match event {
                TokenEvent::Admitted { .. } => {}
                TokenEvent::Prompt(reports) => output.prompt = Some(reports),
                TokenEvent::Vector(vector) => output.vector = Some(vector),
                TokenEvent::Token(token) => output.tokens.push(token),
                TokenEvent::Finished { reason, usage } => output.end = Some((reason, usage)),
                TokenEvent::Failed { error } | TokenEvent::GrammarFailed { error } => panic!("{id:?}: {error}"),
            }
        }
    }
    (0..requests.len()).map(|i| outputs.remove(&RequestId(i as u64)).unwrap()).collect()
}

/// Runs a request that the device refuses, next to another one. On the CPU only the refused one ends, and the other
/// gets the same tokens as alone. On a GPU a kernel that traps loses the context, so no later step can succeed; run
/// this in its own process.
pub fn fails_a_step<E: StepExecutor>(engine: &mut EngineCore<E>, target: Target) {
    engine.set_depth(2);
    let neighbour = greedy(&[1, 2, 3], 4);
    let alone = run(engine, std::slice::from_ref(&neighbour)).remove(0);
    // No vocabulary has this id; `EngineLimits::check` would refuse it.
    let refused = greedy(&[1, engine.limits().vocab_size as u32, 2], 4);
    let (ended, tokens) = recover_from(engine, [refused, neighbour.clone()], target);
    if target == Target::Cuda {
        assert_eq!(ended, [RequestId(0), RequestId(1)]);
    } else {
        assert_eq!((ended, tokens), (vec![RequestId(0)], alone.ids()));
        // Together, together again, and alone.
        assert_eq!(engine.stats().failed_steps, 3);
        assert_eq!(run(engine, &[neighbour])[0].ids(), alone.ids());
    }
    assert!(!engine.has_work());
    assert_eq!(engine.stats().kv_blocks_free, engine.stats().kv_blocks_total);
}

/// Runs two requests, of which the device refuses the first, to their end or that of the device. Returns the failed
/// ones and the tokens of the second.
fn recover_from<E: StepExecutor>(
    engine: &mut EngineCore<E>,
    requests: [GenerateRequest; 2],
    target: Target,
) -> (Vec<RequestId>, Vec<u32>) {
    (0..).zip(requests).for_each(|(id, request)| engine.add(RequestId(id), request));
    let (mut failed, mut tokens) = (Vec::new(), Vec::new());
    while engine.has_work() {
        let result = match engine.plan() {
            Some(admitted) => engine.launch().map(|()| admitted),
            None => engine.finish(),
        };
        let events = result.unwrap_or_else(|error| {
            assert_eq!(error.fatal, target == Target::Cuda, "{error}");
            assert!(error.fatal || error.message.contains("vocabulary"), "{error}");
            if error.fatal { engine.end_all(&error) } else { engine.recover(&error) }
        });
        for (id, event) in events {
            match event {
                TokenEvent::Token(token) if id == RequestId(1) => tokens.push(token.id),
                TokenEvent::Failed { .. } => failed.push(id),
                _ => {}
            }
        }
    }
    (failed, tokens)
}
