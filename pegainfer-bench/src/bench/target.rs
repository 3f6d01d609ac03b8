//! Servers and engines of this process, as targets of a benchmark.

use super::http::Api;
use crate::in_process::Servers;
use anyhow::{Result, ensure};
use pegainfer_core::engine::EngineHandle;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine;
use std::path::Path;
use tokio::runtime::Runtime;

/// Connects to a server.
pub fn connect(url: &str, (runtime, servers): (&Runtime, &dyn Servers)) -> Result<Api> {
    servers.raise_open_files();
    runtime.block_on(Api::connect(url))
}

/// Loads the model in `dir`, for at most `max_concurrency` requests at the same time.
pub fn load(dir: &Path, args: &EngineArgs, max_concurrency: usize) -> Result<EngineHandle> {
    let engine = engine::load(dir, args)?.handle;
    ensure!(
        max_concurrency <= engine.limits().max_num_seqs * engine.engines().len(),
        "a concurrency of {max_concurrency} needs --max-num-seqs {max_concurrency}: otherwise requests wait for each other"
    );
    Ok(engine)
}

/// Serves an engine of the model in `dir` over HTTP, until `runtime` is shut down.
pub fn serve(engine: EngineHandle, dir: &Path, (runtime, servers): (&Runtime, &dyn Servers)) -> Result<Api> {
    servers.raise_open_files();
    runtime.block_on(async { Api::connect(&format!("http://{}", servers.serve(engine, dir)?)).await })
}
