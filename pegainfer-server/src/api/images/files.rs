//! The files of a conversation's images, and their places in its prompt.
//!
//! A chat template writes one token for each image. In the prompt, as many of them stand there as the image has tokens
//! after scaling. The header of a file tells that number, so nothing is decoded here.

use super::part::{ImageContent, ImagePart, ImageSource, invalid};
use crate::api::message::Message;
use crate::error::ApiError;
use crate::fair_queue::Permits;
use crate::limits::ImageFlags;
use crate::text_service::{CancelCheck, ImageReader};
use pegainfer_images::{Header, Resolution, from_base64, from_data_url, probe};

/// The file of an image.
pub struct ImageFile {
    /// Its place in the request, for errors.
    pub at: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Their BLAKE3.
    pub hash: [u8; 32],
    /// What its header says.
    pub header: Header,
    /// The size that the request asks for.
    pub resolution: Resolution,
    /// Number of its tokens in the prompt.
    pub tokens: usize,
    /// Index of the first of them.
    pub start: usize,
}

/// The files of a conversation's images, in the order of the prompt.
#[derive(Default)]
pub struct ImageFiles {
    /// Field of the request that has the images.
    pub field: &'static str,
    /// The files.
    pub files: Vec<ImageFile>,
    /// Memory of files from other servers; held until they are decoded.
    _permits: Option<Permits>,
}

/// The images of a conversation, taken from its messages.
#[derive(Debug, Default)]
pub struct Sources {
    /// Field of the request that has them.
    pub field: &'static str,
    /// Each with its place in the request.
    pub images: Vec<(String, ImageSource)>,
    /// Areas after scaling.
    pub pixels: ImagePixels,
    /// Memory of files from other servers.
    pub permits: Option<Permits>,
}

/// Areas after scaling that a request asks for, in pixels: `mm_processor_kwargs`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImagePixels {
    /// Minimum.
    pub min: Option<u64>,
    /// Maximum.
    pub max: Option<u64>,
}

impl Sources {
    /// Takes the images of messages.
    pub fn take(
        messages: &mut [Message],
        field: &'static str,
        (max_images, pixels): (usize, ImagePixels),
    ) -> Result<Self, ApiError> {
        let mut images = Vec::new();
        for ImagePart { at, source, .. } in messages.iter_mut().flat_map(Message::images_mut) {
            let empty = ImageSource::base64(String::new());
            images.push((at.clone(), std::mem::replace(source, Ok(empty))?));
            if images.len() > max_images {
                let message = format!("the request has more than {max_images} images (--max-images); leave out some");
                return Err(invalid(field, at, message));
            }
        }
        Ok(Self { field, images, pixels, permits: None })
    }

    /// Reads the files and their headers.
    pub fn open(
        self,
        reader: &ImageReader,
        flags: &ImageFlags,
        cancel: &CancelCheck<'_>,
    ) -> Result<ImageFiles, ApiError> {
        let Self { field, images, pixels: ImagePixels { min: min_pixels, max: max_pixels }, permits } = self;
        let (limits, processor) = (flags.of_image(), reader.processor(flags));
        let open = |(at, ImageSource { content, detail }): (String, ImageSource)| {
            let resolution = Resolution { detail, min_pixels, max_pixels };
            let read = || {
                let bytes = match content {
                    ImageContent::Base64(text) => from_base64(&text, &limits)?,
                    // What was not fetched is no data URL.
                    ImageContent::DataUrl(url) | ImageContent::Remote(url) => from_data_url(&url, &limits)?,
                    ImageContent::Fetched(bytes) => bytes,
                };
                let header = probe(&bytes, &limits)?;
                let tokens = processor.tokens(&header, &resolution)? as usize;
                Ok((bytes, header, tokens))
            };
            let (bytes, header, tokens) =
                read().map_err(|error: pegainfer_images::ImageError| invalid(field, &at, error))?;
            let hash = *blake3::hash(&bytes).as_bytes();
            Ok(ImageFile { at, bytes, hash, header, resolution, tokens, start: 0 })
        };
        let images = images.into_iter().take_while(|_| !cancel.is_cancelled());
        Ok(ImageFiles { field, files: images.map(open).collect::<Result<_, ApiError>>()?, _permits: permits })
    }
}

impl ImageFiles {
    /// Bytes of all files.
    pub fn bytes(&self) -> usize {
        self.files.iter().map(|file| file.bytes.len()).sum()
    }

    /// The prompt with as many image tokens for each image as it has, where the chat template has written one.
    pub fn expand(&mut self, ids: Vec<u32>, reader: &ImageReader) -> Result<Vec<u32>, ApiError> {
        let written = ids.iter().filter(|&&id| id == reader.token).count();
        if written != self.files.len() {
            let (field, images) = (self.field, self.files.len());
            let message = format!(
                "{field} have {images} images, but the prompt has {written} image tokens: leave {} out of texts, names \
                 and tools",
                reader.marker()
            );
            return Err(ApiError::invalid(field, message).with_code("invalid_image"));
        }
        if self.files.is_empty() {
            return Ok(ids);
        }
        let mut expanded = Vec::with_capacity(ids.len() + self.files.iter().map(|file| file.tokens).sum::<usize>());
        let mut next = 0;
        for id in ids {
            match self.files.get_mut(next).filter(|_| id == reader.token) {
                Some(file) => {
                    file.start = expanded.len();
                    expanded.resize(file.start + file.tokens, id);
                    next += 1;
                }
                None => expanded.push(id),
            }
        }
        Ok(expanded)
    }
}
