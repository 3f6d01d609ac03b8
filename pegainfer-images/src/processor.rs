//! All steps from the bytes of a file to a picture.

use crate::config::{self, DEFAULT_AREAS};
use crate::decode::decode_with;
use crate::error::{ConfigError, ImageError};
use crate::header::{Header, probe};
use crate::limits::ImageLimits;
use crate::picture::Picture;
use crate::resize::resize;
use crate::size::{Areas, FACTOR, Resolution, TOKEN_AREA};

/// Default limit of the tokens of an image.
const DEFAULT_MAX_TOKENS: u32 = 4_096;

/// The image processor of a model: which size an image is scaled to, and the steps that lead there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageProcessor {
    /// Areas of the model: minimum and maximum in pixels.
    model: (u64, u64),
    /// Limit of the server.
    max_tokens: u32,
    /// True if `detail: original` may exceed it.
    serves_original: bool,
}

impl Default for ImageProcessor {
    /// Qwen3.5's areas, 65,536 to 16,777,216 pixels, and at most 4,096 tokens.
    fn default() -> Self {
        Self { model: DEFAULT_AREAS, max_tokens: DEFAULT_MAX_TOKENS, serves_original: false }
    }
}

impl ImageProcessor {
    /// The processor of a model, from the texts of its preprocessor_config.json and processor_config.json. Without both
    /// files the areas are those of Qwen3.5.
    ///
    /// # Errors
    /// [`ConfigError::Json`], and [`ConfigError::Unsupported`] for another type of processor, patch size, mean or filter.
    pub fn from_config(preprocessor: Option<&str>, processor: Option<&str>) -> Result<Self, ConfigError> {
        Ok(Self { model: config::areas(preprocessor, processor)?, ..Self::default() })
    }

    /// Limits the tokens of an image. Larger images are scaled down; 0 counts as 1.
    #[must_use]
    pub fn with_max_tokens(self, max_tokens: u32) -> Self {
        Self { max_tokens: max_tokens.max(1), ..self }
    }

    /// Lets images with `detail: original` have as many tokens as the model allows.
    #[must_use]
    pub fn with_original_detail(self, serves_original: bool) -> Self {
        Self { serves_original, ..self }
    }

    /// Tokens of the largest image that a request may have.
    pub fn max_tokens(&self) -> u32 {
        (self.areas().original / TOKEN_AREA) as u32
    }

    /// Width and height in pixels to which an image is scaled.
    ///
    /// # Errors
    /// [`ImageError::TooNarrow`], [`ImageError::MinPixels`] and [`ImageError::MaxPixels`].
    pub fn size(&self, header: &Header, resolution: &Resolution) -> Result<(u32, u32), ImageError> {
        self.areas().size(header.width, header.height, resolution)
    }

    /// Tokens of an image in the prompt: `width height / 1024` of its scaled size.
    ///
    /// # Errors
    /// Those of [`ImageProcessor::size`].
    pub fn tokens(&self, header: &Header, resolution: &Resolution) -> Result<u32, ImageError> {
        let (width, height) = self.size(header, resolution)?;
        Ok((width / FACTOR) * (height / FACTOR))
    }

    /// Decodes and scales an image. The sizes are checked before anything is decoded.
    ///
    /// # Errors
    /// Those of [`decode`](crate::decode) and of [`ImageProcessor::size`].
    pub fn process(&self, bytes: &[u8], limits: &ImageLimits, resolution: &Resolution) -> Result<Picture, ImageError> {
        let header = probe(bytes, limits)?;
        let (width, height) = self.size(&header, resolution)?;
        resize(decode_with(&header, bytes, limits)?, width, height).try_into()
    }

    fn areas(&self) -> Areas {
        let (min, model_max) = self.model;
        let max = model_max.min(u64::from(self.max_tokens) * TOKEN_AREA);
        Areas { min, max, original: if self.serves_original { model_max } else { max } }
    }
}
