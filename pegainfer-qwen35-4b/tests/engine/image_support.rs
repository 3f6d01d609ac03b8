//! Prompts with images and their reference outputs, see tests/fixtures/README.md.

use crate::support::{Case, STATE_CACHE, bundled_fixture, bundled_model, fixtures, greedy, options, small_cache};
use pegainfer_core::engine::GenerateRequest;
use pegainfer_core::images::{Image, ImageSpan};
use pegainfer_runtime::{LoadOptions, Overrides};
use safetensors::SafeTensors;
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;

/// Checkpoints with a vision tower: heads of 16 values, and of 72.
pub const MODELS: [&str; 2] = ["qwen35-vl-tiny", "qwen35-vl-tiny-hd72"];
/// Id of the tokens of images.
pub const IMAGE_TOKEN: u32 = 4097;

/// Reference outputs of a checkpoint.
pub struct ImageFixture {
    pub cases: Vec<ImageCase>,
    pub images: HashMap<String, Arc<Image>>,
}

/// One prompt with images.
#[derive(Deserialize)]
pub struct ImageCase {
    #[serde(flatten)]
    pub text: Case,
    pub images: Vec<String>,
    pub position_delta: i64,
    /// Time, row and column of each prompt token.
    pub positions_thw: [Vec<u32>; 3],
    #[serde(default)]
    pub rope: Vec<Rope>,
}

/// Cosines and sines of one token.
#[derive(Deserialize)]
pub struct Rope {
    pub index: usize,
    pub thw: [u32; 3],
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

#[derive(Deserialize)]
struct File {
    grids: HashMap<String, (usize, usize)>,
    cases: Vec<ImageCase>,
}

impl ImageFixture {
    pub fn of(model: &str) -> Self {
        let File { grids, cases } = bundled_fixture(&format!("vision/{model}"));
        let bytes = std::fs::read(fixtures().join("vision/pixels.safetensors")).unwrap();
        let pixels = SafeTensors::deserialize(&bytes).unwrap();
        let image = |(name, grid): (String, (usize, usize))| {
            let image = Image::new(grid, pixels.tensor(&name).unwrap().data()).unwrap();
            (name, Arc::new(image))
        };
        Self { cases, images: grids.into_iter().map(image).collect() }
    }

    /// Places of the images of a case.
    pub fn spans(&self, case: &ImageCase) -> Vec<ImageSpan> {
        let (ids, mut from) = (&case.text.prompt_ids, 0);
        let span = |name: &String| {
            let start = from + ids[from..].iter().position(|id| *id == IMAGE_TOKEN).unwrap();
            let span = ImageSpan { start, image: self.images[name].clone() };
            from = span.range().end;
            span
        };
        case.images.iter().map(span).collect()
    }

    /// A greedy request for the case with the first `known` tokens of its answer in the prompt.
    pub fn request(&self, case: &ImageCase, known: usize, max_tokens: usize) -> GenerateRequest {
        let prompt = [&case.text.prompt_ids[..], &case.text.greedy_ids[..known]].concat();
        GenerateRequest { images: self.spans(case).into(), ..greedy(&prompt, max_tokens) }
    }

    pub fn case(&self, name: &str) -> &ImageCase {
        self.cases.iter().find(|case| case.text.name == name).unwrap()
    }
}

/// Options for a checkpoint that reads images.
pub fn image_options(model: &str) -> LoadOptions {
    LoadOptions {
        model_path: bundled_model(model),
        overrides: Overrides { images: true, ..Overrides::default() },
        state_cache_bytes: STATE_CACHE.and_then(small_cache),
        ..options()
    }
}
