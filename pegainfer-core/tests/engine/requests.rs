//! Random requests and their expected results.

use crate::device::{adapted, kv_value, next_token};
use pegainfer_core::engine::{EngineLimits, GenerateRequest};
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::logits_processors::{LogitsProcessorParams, TokenMask};
use std::sync::Arc;

pub const VOCAB: u32 = 50;
/// The end-of-text token.
pub const EOS: u32 = 49;

pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A logit after a request's logits processors, from their definitions and the whole text.
fn processed(
    request: &GenerateRequest,
    params: &LogitsProcessorParams,
    generated: &[u32],
    token: u32,
    logit: f32,
) -> f32 {
    let prompt = &request.prompt;
    let penalised = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0);
    let count = if penalised { generated.iter().filter(|t| **t == token).count() as f32 } else { 0.0 };
    let repeated = penalised && (count > 0.0 || prompt.contains(&token));
    let scale = if repeated { params.repetition_penalty } else { 1.0 };
    let presence = if count > 0.0 { params.presence_penalty + params.frequency_penalty * count } else { 0.0 };
    let stops = generated.len() < params.min_tokens && params.stops.contains(&token);
    let ends =
        |word: &Vec<u32>| word.split_last().is_some_and(|(last, rest)| *last == token && generated.ends_with(rest));
    let bad = params.bad_words.iter().any(ends);
    let allowed = params.allowed_token_ids.as_ref().is_none_or(|ids| ids.contains(&token))
        && (request.grammar.is_none() || Waltz::allows(generated.last().copied(), token));
    if stops || bad || !allowed {
        return f32::NEG_INFINITY;
    }
    let scaled = if logit > 0.0 { logit / scale } else { logit * scale };
    scaled - presence + params.logit_bias.get(&token).copied().unwrap_or(0.0)
}

pub fn continuation(request: &GenerateRequest, params: &LogitsProcessorParams) -> Vec<u32> {
    let mut hash = request.prompt.iter().fold(0, |h, &t| kv_value(h, t));
    let mut out = Vec::new();
    while out.len() < request.max_tokens {
        let prefix = adapted(hash, request.adapter.as_ref().map(|adapter| adapter.id()));
        let token = next_token(prefix, |token, logit| processed(request, params, &out, token, logit));
        out.push(token);
        if (token == EOS && !request.ignore_eos) || request.stop_token_ids.contains(&token) {
            break;
        }
        hash = kv_value(hash, token);
    }
    out
}

/// Prompts are mostly shorter than `40 * scale` tokens, continuations shorter than `80 * scale`.
pub fn random_request(rng: &mut Rng, limits: &EngineLimits, scale: usize) -> GenerateRequest {
    let long = rng.chance(10);
    let prompt_len = rng.below(if long { limits.max_model_len + 8 } else { 40 * scale });
    // Few distinct prefixes, so that requests share blocks.
    let family = rng.below(4) as u64;
    let own_from = rng.below(60 * scale);
    let own = rng.next();
    let prompt: Vec<u32> = (0..prompt_len)
        .map(|i| (mix(if i < own_from { family } else { own } ^ i as u64) % u64::from(VOCAB)) as u32)
        .collect();
    let max_tokens = rng.below(if long { limits.max_model_len } else { 80 * scale });
    GenerateRequest {
        stop_token_ids: if rng.chance(20) { vec![rng.below(VOCAB as usize) as u32] } else { vec![] },
        ignore_eos: rng.chance(60),
        prompt_logprobs: rng.chance(10).then_some(0),
        vector: limits.hidden_size > 0 && rng.chance(20),
        cache_salt: rng.below(2) as u64,
        priority: rng.below(2) as i32,
        tenant: (rng.below(2) as u64) << 32 | rng.below(3) as u64,
        ..GenerateRequest::greedy(prompt, max_tokens)
    }
}

/// Rules for every third request, of every kind.
pub fn random_params(rng: &mut Rng, request: &GenerateRequest) -> LogitsProcessorParams {
    let mut params =
        LogitsProcessorParams { stops: request.stop_token_ids.clone(), ..LogitsProcessorParams::default() };
    if !request.ignore_eos {
        params.stops.push(EOS);
    }
    if !rng.chance(33) {
        return params;
    }
    if rng.chance(40) {
        params.presence_penalty = rng.below(4) as f32 - 2.0;
        params.frequency_penalty = rng.below(4) as f32 * 0.5;
    }
    if rng.chance(30) {
        params.repetition_penalty = 1.0 + rng.below(3) as f32;
    }
    let mut token = || rng.below(VOCAB as usize - 1) as u32;
    let (words, biased) = (vec![vec![token()], vec![token(), token()]], [(token(), 2.5), (token(), -100.0)]);
    if rng.chance(30) {
        params.bad_words = words;
    }
    if rng.chance(30) {
        params.logit_bias = biased.into();
    }
    if rng.chance(40) {
        params.min_tokens = rng.below(30);
    }
    if rng.chance(20) {
        params.allowed_token_ids = Some((0..VOCAB).filter(|token| token % 3 != 0).collect());
    }
    params
}

/// A grammar: neighbours differ modulo 3.
#[derive(Debug)]
pub struct Waltz;

impl Waltz {
    fn allows(last: Option<u32>, token: u32) -> bool {
        last.is_none_or(|last| last % 3 != token % 3)
    }

    pub fn mask(last: Option<u32>) -> Arc<TokenMask> {
        let ids: Vec<u32> = (0..VOCAB).filter(|token| Self::allows(last, *token)).collect();
        Arc::new(TokenMask::new(&ids, VOCAB as usize))
    }
}

impl Grammar for Waltz {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(Self), Self::mask(None))
    }
}

impl Matcher for Waltz {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        Ok(Self::mask(Some(token)))
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        Some(Box::new(Self))
    }
}
