//! How a model reads images: its processor, and its image token.

use super::encoder::Encoder;
use crate::limits::ImageFlags;
use anyhow::Result;
use pegainfer_images::ImageProcessor;
use pegainfer_model_files::ModelFiles;
use pegainfer_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

/// Tokens around images, and those of videos, which no text of a message may contain.
const MARKERS: [&str; 3] = ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"];

/// How a model reads images.
pub struct ImageReader {
    /// Id of the tokens of images.
    pub token: u32,
    /// Texts of this token and of those around images.
    markers: Vec<String>,
    processor: ImageProcessor,
}

impl ImageReader {
    /// The reader of a model whose images have this token; `None`, with a warning, if its images cannot be served.
    pub(super) fn new(
        token: u32,
        processor: &Result<ImageProcessor>,
        template: Option<&ChatTemplate>,
        encoder: &Encoder,
    ) -> Option<Self> {
        let refused = |why: String| {
            log::warn!("the model reads images, but only text is served: {why}");
            None
        };
        let processor = match processor {
            Ok(processor) => *processor,
            Err(error) => return refused(format!("{error:#}")),
        };
        let Some(template) = template else { return refused("it has no chat template".to_owned()) };
        match written(template, encoder, token) {
            Ok(1) => {}
            Ok(n) => return refused(format!("its chat template writes {n} image tokens for one image")),
            Err(error) => return refused(format!("its chat template cannot show an image: {error:#}")),
        }
        let marker = encoder.run(move |tokenizer: &Arc<Tokenizer>| tokenizer.token_text(token));
        let markers = std::iter::once(marker).chain(MARKERS.map(str::to_owned)).collect();
        Some(Self { token, markers, processor })
    }

    /// The processor under these limits.
    pub fn processor(&self, flags: &ImageFlags) -> ImageProcessor {
        self.processor.with_max_tokens(flags.max_image_tokens.get())
    }

    /// Text of the image token.
    pub fn marker(&self) -> &str {
        &self.markers[0]
    }

    /// Texts that must not become tokens when a message contains them.
    pub fn markers(&self) -> &[String] {
        &self.markers
    }
}

/// The image processor that the files of a checkpoint describe.
pub(super) fn processor(dir: &Path) -> Result<ImageProcessor> {
    let files = ModelFiles::open(dir)?;
    let (preprocessor, processor) = (files.read("preprocessor_config.json")?, files.read("processor_config.json")?);
    Ok(ImageProcessor::from_config(preprocessor.as_deref(), processor.as_deref())?)
}

/// Number of image tokens that the chat template writes for one image.
fn written(template: &ChatTemplate, encoder: &Encoder, token: u32) -> Result<usize> {
    let content = json!([{"type": "image"}, {"type": "text", "text": "What is this?"}]);
    let messages: [Value; 1] = [json!({"role": "user", "content": content})];
    let prompt = template.render(&messages, None, true, &Map::new())?;
    let ids = encoder.run(move |tokenizer: &Arc<Tokenizer>| tokenizer.encode(&prompt, false))?;
    Ok(ids.into_iter().filter(|id| *id == token).count())
}
