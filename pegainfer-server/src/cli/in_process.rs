//! Servers in this process, for the commands of pegainfer-bench.

use super::local_server::{LoadedModel, LocalServer};
use crate::app::{App, Options};
use crate::http::{BACKLOG, raise_open_files};
use crate::text_service::Checkpoint;
use anyhow::{Context, Result};
use axum::body::to_bytes;
use pegainfer_bench::in_process::{ChatApi, Response, Servers};
use pegainfer_core::engine::EngineHandle;
use pegainfer_models::args::EngineArgs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpSocket;

/// Starts servers of this crate.
pub struct InProcess;

impl Servers for InProcess {
    fn raise_open_files(&self) {
        raise_open_files();
    }

    fn serve(&self, engine: EngineHandle, dir: &Path) -> Result<SocketAddr> {
        let checkpoint = Checkpoint::load(dir)?;
        checkpoint.tokenizer.check_vocab(engine.limits().vocab_size)?;
        let app = App::new(engine, checkpoint, Vec::new(), Options::default());
        let socket = TcpSocket::new_v4().context("no socket")?;
        socket.bind(([127, 0, 0, 1], 0).into()).context("no free port")?;
        let listener = socket.listen(BACKLOG).context("the server cannot listen")?;
        let address = listener.local_addr().context("the server's address is unknown")?;
        tokio::spawn(app.serve(listener, std::future::pending()));
        Ok(address)
    }

    fn load(&self, args: &EngineArgs) -> Result<ChatApi> {
        let model = LoadedModel::load(args)?;
        let (source, has_template) = (model.source.clone(), model.checkpoint.template.is_some());
        let server = LocalServer::new(model, Vec::new(), Options::default());
        let max_num_seqs = server.limits.max_num_seqs;
        let post = move |body: Vec<u8>| {
            let server = server.clone();
            let response = async move {
                let response = server.post("/v1/chat/completions", body).await?;
                let status = response.status().as_u16();
                let body = to_bytes(response.into_body(), usize::MAX).await.context("the response broke off")?;
                Ok(Response { status, body: body.into() })
            };
            Box::pin(response) as _
        };
        Ok(ChatApi { source, has_template, max_num_seqs, post: Arc::new(post) })
    }
}
