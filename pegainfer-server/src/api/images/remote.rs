//! The images of a conversation that are on other servers.

use super::fetch::{FetchLimits, MAX_TIME};
use super::files::Sources;
use super::memory::units;
use super::part::{ImageContent, SEND, invalid};
use crate::api::body::RequestContext;
use crate::api::model_state::ModelState;
use crate::error::ApiError;
use crate::lifecycle::Deadline;
use futures_util::{StreamExt, stream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::time::Instant;

/// Maximum number of files that a request fetches at the same time.
const AT_ONCE: usize = 4;

impl Sources {
    /// Fetches the files that are on other servers.
    pub async fn fetch(&mut self, state: &ModelState, context: &RequestContext) -> Result<(), ApiError> {
        let mut remote = Vec::new();
        for (i, (at, source)) in self.images.iter().enumerate() {
            let ImageContent::Remote(url) = &source.content else { continue };
            let Some(fetcher) = &state.options.image_fetcher else {
                return Err(invalid(
                    self.field,
                    at,
                    format!("the server fetches no images from other servers; {SEND}"),
                ));
            };
            let url = fetcher.check(url).map_err(|error| invalid(self.field, at, error))?;
            remote.push((i, fetcher.clone(), url));
        }
        if remote.is_empty() {
            return Ok(());
        }
        let file_bytes = state.options.limits.images.of_image().max_bytes;
        let (mut permits, bytes) = state.images.files(context.tenant, remote.len(), file_bytes).await?;
        let end = Instant::now() + MAX_TIME;
        let limits = Arc::new(FetchLimits { end, file_bytes, bytes, taken: AtomicUsize::new(0) });
        let shared = limits.clone();
        let fetches = remote.into_iter().map(move |(i, fetcher, url)| {
            let limits = shared.clone();
            async move { (i, fetcher.fetch(url, &limits).await) }
        });
        let mut fetched = stream::iter(fetches).buffer_unordered(AT_ONCE);
        while let Some((i, file)) = Deadline::bound(context.deadline, fetched.next()).await? {
            let (at, source) = &mut self.images[i];
            source.content = ImageContent::Fetched(file.map_err(|error| invalid(self.field, at, error))?);
        }
        permits.shrink(units(limits.taken.load(Ordering::Relaxed) as u64));
        self.permits = Some(permits);
        Ok(())
    }
}
