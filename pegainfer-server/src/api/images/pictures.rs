//! Decoded and scaled images of a request. Images are decoded on threads of their own, unless a recent request had them.

use super::files::{ImageFile, ImageFiles};
use super::part::invalid;
use crate::api::body::RequestContext;
use crate::api::model_state::ModelState;
use crate::api::state::encoder_error;
use crate::error::ApiError;
use crate::fair_queue::Permits;
use crate::lifecycle::Deadline;
use crate::text_service::{CancelCheck, ImageReader};
use pegainfer_core::engine::GenerateRequest;
use pegainfer_core::images::{Image, ImageSpan};
use pegainfer_images::{ImageError, ImageLimits, ImageProcessor};
use std::sync::Arc;
use std::time::Duration;

/// Maximum time for one image; the slowest file within the default limits takes 2.7 s.
const MAX_TIME: Duration = Duration::from_secs(5);

/// The images of a request, which keep their memory.
#[derive(Debug, Clone, Default)]
pub struct Pictures {
    /// The images at their places in the prompt.
    spans: Arc<[ImageSpan]>,
    /// Their memory; given back when the last choice has ended.
    permits: Option<Arc<Permits>>,
}

impl Pictures {
    /// Decodes and scales the images of a prompt off the async threads, and adds them to its requests, which the engine
    /// must be able to serve.
    pub async fn add(
        requests: &mut [GenerateRequest],
        images: ImageFiles,
        context: &RequestContext,
        state: &ModelState,
    ) -> Result<Self, ApiError> {
        let Some(reader) = state.model.text.images.as_ref().filter(|_| !images.files.is_empty()) else {
            return Ok(Self::default());
        };
        for request in &*requests {
            state.model.engine.check(request).map_err(|error| ApiError::from_submit(error, images.field))?;
        }
        let decoded = Self::decode(images, reader, context, state);
        let pictures = Deadline::bound(context.deadline, decoded).await??;
        requests.iter_mut().for_each(|request| request.images = pictures.spans.clone());
        Ok(pictures)
    }

    async fn decode(
        images: ImageFiles,
        reader: &ImageReader,
        context: &RequestContext,
        state: &ModelState,
    ) -> Result<Self, ApiError> {
        let (memory, field, tenant) = (&state.images, images.field, context.tenant);
        let permits = memory.pictures(tenant, images.files.iter().map(|file| file.tokens).sum()).await?;
        let flags = &state.options.limits.images;
        let (processor, limits) = (reader.processor(flags), flags.of_image());
        let mut spans = Vec::with_capacity(images.files.len());
        for file in images.files {
            let (start, at) = (file.start, file.at.clone());
            let size = processor.size(&file.header, &file.resolution);
            let size = size.map_err(|error| invalid(field, &at, error))?;
            let key = (tenant, file.hash, size);
            if let Some(image) = memory.recent.get(&key) {
                spans.push(ImageSpan { start, image });
                continue;
            }
            let turn = memory.decoder(tenant, file.header.pixels()).await?;
            let work = move |_: &CancelCheck<'_>| decode(&file, &processor, &limits);
            // A decoder cannot be stopped. Its thread keeps its memory until it ends.
            let decoded = tokio::time::timeout(MAX_TIME, state.workers.own_thread(turn, work)).await.map_err(|_| {
                let seconds = MAX_TIME.as_secs();
                invalid(field, &at, format!("the image takes longer than {seconds} s to decode; scale it down"))
            })?;
            let image = decoded.map_err(|error| encoder_error(&error))?.map_err(|error| invalid(field, &at, error))?;
            let image = Arc::new(image);
            memory.recent.insert(key, image.clone());
            spans.push(ImageSpan { start, image });
        }
        Ok(Self { spans: spans.into(), permits: Some(Arc::new(permits)) })
    }

    /// Memory of the images.
    pub fn permits(&self) -> Option<Arc<Permits>> {
        self.permits.clone()
    }
}

fn decode(file: &ImageFile, processor: &ImageProcessor, limits: &ImageLimits) -> Result<Image, ImageError> {
    let picture = processor.process(&file.bytes, limits, &file.resolution)?;
    let (rows, columns) = picture.grid();
    let (width, height, bytes) = (picture.width(), picture.height(), picture.pixels().len());
    let image = Image::new((rows as usize, columns as usize), picture.pixels().clone());
    image.ok_or(ImageError::Malformed { width, height, bytes })
}
