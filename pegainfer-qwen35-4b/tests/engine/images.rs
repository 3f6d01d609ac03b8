//! A request with images gives the same bits however it is scheduled, and shares prefixes only with requests of the
//! same images.

use crate::image_support::{IMAGE_TOKEN, ImageFixture, MODELS, image_options};
use crate::mtp_support::Checkpoint;
use crate::support::invariance::Alone;
use crate::support::invariance::same;
use crate::support::speculation::by_model;
use crate::support::{
    best, bundled_model, engine, engine_on, greedy, options, rank_counts, requests, run, run_arriving, with_logprobs,
};
use pegainfer_core::engine::{GenerateRequest, StepEngine, SubmitError};
use pegainfer_core::images::{Image, ImageSpan};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_runtime::LoadOptions;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Cases of [`mixed_requests`].
const CASES: [&str; 4] = ["one_small", "one_photo", "two_images", "two_turns"];

fn vl() -> LoadOptions {
    image_options(MODELS[0])
}

/// A pool for little more than the longest request.
fn tight() -> LoadOptions {
    LoadOptions { kv_cache_bytes: Some(32 * 16 * 2048), max_num_batched_tokens: Some(64), ..vl() }
}

/// Prompts with one and two images, every other one sampled, and between them prompts of text.
fn mixed_requests() -> Vec<GenerateRequest> {
    let fixture = ImageFixture::of(MODELS[0]);
    let text = requests().into_iter().rev().filter(|request| request.prompt.len() > 10);
    let with_images = CASES.map(|name| fixture.request(fixture.case(name), 0, 40));
    let mut all: Vec<_> = with_images.into_iter().zip(text).flat_map(|(image, text)| [image, text]).collect();
    for (i, request) in all.iter_mut().enumerate().filter(|(i, _)| i % 4 == 2) {
        request.sampling = SamplingParams::new(0.9, 40, 0.95, 0.01, i as u64).unwrap();
    }
    all
}

fn alone() -> Alone {
    Alone::new(&mut engine(best(), &vl()), best(), mixed_requests())
}

#[test]
fn bits_with_images_do_not_depend_on_chunks() {
    let alone = alone();
    for budget in [7, 50] {
        let options = LoadOptions { max_num_seqs: Some(1), max_num_batched_tokens: Some(budget), ..vl() };
        alone.holds(&format!("chunks of {budget}"), &mut engine(best(), &options));
    }
}

#[test]
fn bits_with_images_do_not_depend_on_company_cache_or_preemption() {
    let many = alone().cycle(16);
    many.holds_cold_and_warm(&mut engine(best(), &vl()));
    let mixed = LoadOptions { max_num_batched_tokens: Some(48), state_cache_bytes: Some(8_000_000), ..vl() };
    many.holds_mixed_and_preempted(|| engine(best(), &mixed), || engine(best(), &tight()));
}

/// An image of 400 tokens is encoded in two parts, beside sequences that decode.
#[test]
fn bits_do_not_depend_on_encoding_in_parts() {
    let pixels: Vec<u8> = (0..640 * 640 * 3).map(|i| (i * 7 % 251) as u8).collect();
    let image = Arc::new(Image::new((40, 40), pixels).unwrap());
    let with_image = |start: usize| {
        let text = requests().remove(0).prompt.to_vec();
        let prompt = [&text[..start], &[IMAGE_TOKEN; 400], &text[..3]].concat();
        let images = [ImageSpan { start, image: image.clone() }].into();
        GenerateRequest { images, ..greedy(&prompt, 8) }
    };
    let texts = requests().into_iter().take(4).map(|request| greedy(&request.prompt, 30));
    let all: Vec<_> = texts.chain([with_image(2), with_image(5)]).map(with_logprobs).collect();
    let alone: Vec<_> =
        all.iter().map(|one| run(&mut engine(best(), &vl()), std::slice::from_ref(one)).remove(0)).collect();
    for depth in [1, 2] {
        let mut engine = engine(best(), &vl());
        engine.set_depth(depth);
        let arriving: Vec<_> =
            all.iter().enumerate().map(|(i, one)| (if i < 4 { 0 } else { 6 + i }, one.clone())).collect();
        same(&format!("depth {depth}"), best(), &all, &alone, &run_arriving(&mut engine, &arriving));
    }
}

#[test]
fn drafts_change_no_bit_of_a_request_with_images() {
    let with = |options: &LoadOptions, speculation| engine(best(), &LoadOptions { speculation, ..options.clone() });
    let many = alone().cycle(16);
    many.holds_with_drafts(|drafts| with(&vl(), drafts), |drafts| with(&tight(), drafts));
}

/// The layer that drafts sees the rows of images, too. It is drafted for in every request.
#[test]
fn drafts_of_the_model_change_no_bit_of_a_request_with_images() {
    let checkpoint = Checkpoint::repeating_of(MODELS[0], "images");
    let with = |options: &LoadOptions, speculation| {
        engine(best(), &LoadOptions { speculation, model_path: checkpoint.path(), ..options.clone() })
    };
    let mut requests = mixed_requests();
    for request in requests.iter_mut().step_by(3) {
        // The layer drafts the token before, which is right here.
        let always = LogitsProcessorParams { logit_bias: BTreeMap::from([(300, 100.0)]), ..Default::default() };
        request.logits_processors = LogitsProcessors::new(always, 4160).unwrap();
    }
    let many = Alone::new(&mut with(&vl(), None), best(), requests).cycle(16);
    for (drafts, depth) in [(1, 2), (4, 1)] {
        let mut drafting = with(&vl(), by_model(drafts));
        drafting.set_depth(depth);
        many.holds_with_drafts_of_the_model(&format!("{drafts} drafts, depth {depth}"), &mut drafting);
    }
    let preemptions = many.holds_with_drafts_of_the_model("few blocks", &mut with(&tight(), by_model(3)));
    assert!(preemptions > 0, "nothing was preempted");
}

#[test]
fn ranks_share_the_text_model_and_each_has_the_tower() {
    let requests: Vec<_> = mixed_requests().into_iter().take(4).collect();
    for ranks in rank_counts(&[2]) {
        let mut engine = engine_on(ranks, best(), &LoadOptions { check_ranks: true, ..vl() });
        let alone = Alone::new(&mut engine, best(), requests.clone());
        alone.holds("two ranks", &mut engine);
    }
}

#[test]
fn a_prefix_is_shared_by_requests_of_the_same_image_only() {
    let fixture = ImageFixture::of(MODELS[0]);
    let mut engine = engine(best(), &vl());
    let (small, photo) = (fixture.case("one_small"), fixture.case("one_photo"));
    assert_eq!(small.text.prompt_ids, photo.text.prompt_ids, "the tokens do not tell the images apart");
    let mut cached = |request: &GenerateRequest| {
        let output = run(&mut engine, std::slice::from_ref(request)).remove(0);
        (output.end.as_ref().unwrap().1.cached_tokens, output.ids())
    };
    let [small, photo] = [small, photo].map(|case| fixture.request(case, 0, 8));
    let (cold, first) = (cached(&small), cached(&photo));
    assert_eq!((cold.0, first.0), (0, 0));
    assert_ne!(cold.1, first.1, "the image does not matter");
    assert_eq!((cached(&small), cached(&photo)), ((80, cold.1.clone()), (80, first.1)));
    // The same pixels from another decoding.
    let copy = Image::new((14, 20), small.images[0].image.pixels()).unwrap();
    let spans = [ImageSpan { start: small.images[0].start, image: copy.into() }];
    let copied = GenerateRequest { images: spans.into(), ..small.clone() };
    assert_eq!(cached(&copied), (80, cold.1));
    let text = GenerateRequest { images: [].into(), ..small.clone() };
    assert_eq!(cached(&text).0, 0, "the tokens alone are another prompt");
    let salted = GenerateRequest { cache_salt: 7, ..small };
    assert_eq!(cached(&salted).0, 0);
}

#[test]
fn images_that_do_not_fit_are_refused_at_submit() {
    let fixture = ImageFixture::of(MODELS[0]);
    let request = fixture.request(fixture.case("one_small"), 0, 1);
    let limits = engine(best(), &vl()).limits();
    assert_eq!((limits.image_token, limits.check(&request)), (Some(IMAGE_TOKEN), Ok(())));
    let moved = ImageSpan { start: request.images[0].start + 1, ..request.images[0].clone() };
    let moved = GenerateRequest { images: [moved].into(), ..request.clone() };
    assert!(matches!(limits.check(&moved), Err(SubmitError::InvalidImages { .. })));
    let text_only = LoadOptions { model_path: bundled_model(MODELS[0]), ..options() };
    let mut text_only = engine(best(), &text_only);
    let refused = text_only.limits().check(&request).unwrap_err();
    assert_eq!(refused, SubmitError::Unsupported { field: "an image" });
    // Text gets the same answer with and without a tower.
    let text = greedy(&request.prompt[..4], 12);
    let expected = run(&mut engine(best(), &vl()), std::slice::from_ref(&text));
    assert_eq!(run(&mut text_only, &[text])[0].ids(), expected[0].ids());
}
