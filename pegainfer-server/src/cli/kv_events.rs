//! The flag for KV events.

use crate::adapters::Adapters;
use crate::kv_events::{BoundKvEvents, KvEvents, KvEventsFlag, parse};
use anyhow::Result;
use clap::Args;
use pegainfer_core::engine::EngineHandle;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Flags for KV events.
#[derive(Debug, Clone, Default, Args)]
pub struct KvEventsArgs {
    /// Publish which blocks of the KV cache hold which tokens, for routers, as vLLM's JSON, such as
    /// {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"} (docs/operations/routers.md)
    #[arg(long, value_name = "JSON", value_parser = parse)]
    pub kv_events_config: Option<KvEventsFlag>,
}

impl KvEventsArgs {
    /// True if events are published.
    pub(super) fn is_on(&self) -> bool {
        matches!(self.kv_events_config, Some(KvEventsFlag::On(_)))
    }

    /// Listens for subscribers of a model with this number of engines, if events are published.
    pub(super) fn bind(&self, engines: NonZeroUsize) -> Result<Option<BoundKvEvents>> {
        match &self.kv_events_config {
            Some(KvEventsFlag::On(config)) => BoundKvEvents::bind(config, engines.get()).map(Some),
            Some(KvEventsFlag::Off) | None => Ok(None),
        }
    }
}

/// Publishes the events of a model that has not served a request yet, if there are sockets for them.
pub(super) fn publish(
    bound: Option<BoundKvEvents>,
    model: &str,
    engine: &EngineHandle,
    adapters: Option<&Arc<Adapters>>,
) -> Result<Option<KvEvents>> {
    bound.map(|bound| bound.publish(model, engine, adapters)).transpose()
}
