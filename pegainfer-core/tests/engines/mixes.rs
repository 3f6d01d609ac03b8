//! Mixes of all sampling options: each request gives the same result as alone.
//!
//! A mix is drawn from a seed, which a failure prints; `PEGAINFER_TEST_SEED=n` draws it again. Requests have any of:
//! greedy or seeded draws with temperature, top-p, top-k and min-p; the three penalties; biases; bad words; minimum
//! tokens before a stop; allowed ids; a grammar; log-probabilities of output and prompt; several choices of one prompt.
//! They arrive at different times and share prefixes.

use super::speculation::{Three, oracle_with_errors};
use super::{Output, run, run_arriving};
use pegainfer_core::engine::{GenerateRequest, RequestId, StepEngine};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::rng;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_core::schedule::{EngineCore, StepExecutor};
use std::sync::Arc;

/// Ids of the vocabularies of all tests.
const VOCAB: usize = 4096;
/// Different requests of a test.
const REQUESTS: usize = 96;
/// Maximum number of requests of a mix, choices not counted.
const MIXED: usize = 40;
/// Number of steps in which the requests of a mix arrive.
const ARRIVALS: usize = 30;
/// Ids that biases make likely, so that their logits processors matter.
const LIKELY: [u32; 6] = [300, 341, 382, 423, 464, 505];

/// Draws.
struct Rng {
    seed: u64,
    drawn: u64,
}

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        rng::below(rng::bits(self.seed, self.drawn), n as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// Requests for up to 56 tokens with any options, drawn from `seed`, for a vocabulary of [`VOCAB`] ids.
pub fn draw(seed: u64, requests: usize) -> Vec<GenerateRequest> {
    let rng = &mut Rng { seed, drawn: 0 };
    (0..requests).map(|_| request(rng)).collect()
}

fn request(rng: &mut Rng) -> GenerateRequest {
    // Four texts with common beginnings, so that blocks are shared.
    let (family, shared, length) = (rng.below(4) as u64, rng.below(60), 2 + rng.below(60));
    let own = rng.below(1 << 30) as u64;
    let id = |place: usize| rng::below(rng::bits(if place < shared { family } else { own }, place as u64), 4000) as u32;
    let prompt: Vec<u32> = (0..length).map(id).collect();
    let mut request = GenerateRequest::greedy(prompt, 1 + rng.below(56));
    if rng.chance(65) {
        let (temperature, top_k) = (rng.of(&[0.3, 0.8, 1.0, 1.5]), rng.of(&[0, 0, 1, 5, 40]));
        let (top_p, min_p) = (rng.of(&[1.0, 1.0, 0.9, 0.5]), rng.of(&[0.0, 0.0, 0.05, 0.3]));
        request.sampling = SamplingParams::new(temperature, top_k, top_p, min_p, own).unwrap();
    }
    request.ignore_eos = rng.chance(50);
    if rng.chance(40) {
        request.stop_token_ids = vec![rng.of(&LIKELY)];
    }
    let params = params(rng, &request);
    let has_list = params.allowed_token_ids.is_some();
    request.logits_processors = LogitsProcessors::new(params, VOCAB).unwrap();
    if !has_list && rng.chance(20) {
        request.grammar = Some(Arc::new(Three));
    }
    request.logprobs = rng.chance(50).then(|| rng.below(6));
    request.prompt_logprobs = rng.chance(15).then(|| rng.below(3));
    request
}

/// The logits processors of half of the requests.
fn params(rng: &mut Rng, request: &GenerateRequest) -> LogitsProcessorParams {
    let mut params = LogitsProcessorParams::default();
    if rng.chance(50) {
        return params;
    }
    if rng.chance(30) {
        params.presence_penalty = rng.of(&[-1.0, 0.5, 2.0]);
    }
    if rng.chance(30) {
        params.frequency_penalty = rng.of(&[-0.5, 0.5, 1.0]);
    }
    if rng.chance(30) {
        params.repetition_penalty = rng.of(&[0.8, 1.2, 2.0]);
    }
    if rng.chance(50) {
        params.logit_bias = LIKELY.iter().map(|id| (*id, rng.of(&[-2.0, 4.0, 8.0]))).collect();
    }
    if rng.chance(30) {
        params.bad_words = vec![vec![rng.of(&LIKELY)], vec![rng.of(&LIKELY), rng.of(&LIKELY)]];
    }
    if rng.chance(40) {
        (params.min_tokens, params.stops) = (rng.below(16), request.stop_token_ids.clone());
    }
    if rng.chance(20) {
        let bad = params.bad_words.first().map_or(u32::MAX, |word| word[0]);
        let allowed = |id: &u32| id.is_multiple_of(7) && *id != bad && !params.stops.contains(id);
        params.allowed_token_ids = Some((0..VOCAB as u32).filter(allowed).collect());
    }
    params
}

/// Requests to draw mixes from, and the result of each alone with a cold prefix cache.
struct Pool {
    requests: Vec<GenerateRequest>,
    outputs: Vec<Output>,
}

impl Pool {
    fn new(seed: u64, engine: &mut impl StepEngine) -> Self {
        let requests = draw(seed, REQUESTS);
        let cold =
            |(i, request): (usize, &GenerateRequest)| GenerateRequest { cache_salt: 1 + i as u64, ..request.clone() };
        let outputs = requests.iter().enumerate().map(|request| run(engine, &[cold(request)]).remove(0)).collect();
        Self { requests, outputs }
    }

    /// Some of the requests, with the steps at which they arrive and their numbers in the pool. Some arrive again as
    /// another choice of the same prompt.
    fn mix(&self, rng: &mut Rng) -> Vec<(usize, GenerateRequest, usize)> {
        let mut mix = Vec::new();
        for _ in 0..=rng.below(MIXED) {
            let (number, at) = (rng.below(self.requests.len()), rng.below(ARRIVALS));
            let first = RequestId(mix.len() as u64);
            mix.push((at, self.requests[number].clone(), number));
            for _ in 0..if rng.chance(20) { 1 + rng.below(2) } else { 0 } {
                let choice = GenerateRequest { same_prompt_as: Some(first), ..self.requests[number].clone() };
                mix.push((at, choice, number));
            }
        }
        mix
    }

    /// Draws mixes and runs them until `engine` has run `steps` steps.
    fn holds(&self, what: &str, seed: u64, engine: &mut impl StepEngine, steps: u64) {
        let (rng, before) = (&mut Rng { seed, drawn: 1 << 32 }, engine.stats().steps);
        while engine.stats().steps - before < steps {
            let mix = self.mix(rng);
            let arriving: Vec<_> = mix.iter().map(|(at, request, _)| (*at, request.clone())).collect();
            for (got, (_, request, number)) in run_arriving(engine, &arriving).iter().zip(&mix) {
                let alone = &self.outputs[*number];
                let same = got.bits() == alone.bits() && got.prompt == alone.prompt;
                assert!(same, "{what}, seed {seed}: {request:?} gave\n{got:?}\nbut alone\n{alone:?}");
            }
        }
    }
}

/// Checks with one and two steps in flight, with and without drafts, most of which are right: tokens, log-probabilities
/// and those of prompts are bit for bit the same as for each request alone, in `steps` steps. For CPUs, where no sum
/// depends on the batch.
pub fn each_request_gives_what_it_gives_alone<E: StepExecutor>(
    steps: u64,
    engine: impl Fn(Option<Speculation>) -> EngineCore<E>,
) {
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = std::env::var("PEGAINFER_TEST_SEED").map_or_else(|_| now(), |seed| seed.parse().unwrap());
    println!("seed {seed}");
    let pool = Pool::new(seed, &mut engine(None));
    let texts = pool.requests.iter().zip(&pool.outputs).map(|(r, output)| [&*r.prompt, &output.ids()].concat());
    let texts: Vec<Vec<u32>> = texts.collect();
    let (mut preemptions, mut hits) = (0, 0);
    for (mix, (depth, drafts)) in [(1, 0), (2, 0), (1, 4), (2, 2)].into_iter().enumerate() {
        let what = format!("depth {depth}, {drafts} drafts");
        let mut engine = engine((drafts > 0).then(|| oracle_with_errors(drafts, texts.clone(), 7)).flatten());
        engine.set_depth(depth);
        pool.holds(&what, seed ^ mix as u64, &mut engine, steps / 4);
        let (stats, accepted) = (engine.stats(), engine.stats().speculation.accepted_tokens());
        println!("{what}: {} tokens in {} steps, {accepted} accepted drafts", stats.generation_tokens, stats.steps);
        assert!(drafts == 0 || accepted > steps / 100, "{what}: few drafts are accepted");
        (preemptions, hits) = (preemptions + stats.preemptions, hits + stats.prefix_hits);
    }
    println!("{preemptions} preemptions, {hits} cached tokens");
    assert!(preemptions > 0 && hits > steps / 4, "the mixes are too easy");
}
