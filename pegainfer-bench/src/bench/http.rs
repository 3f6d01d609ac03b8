//! A low-latency client of an OpenAI-compatible server: HTTP/1.1 and server-sent events, one connection per request.
//! [`Api::complete`] asks `/v1/completions`; [`chat`](super::chat) asks `/v1/chat/completions`.

use super::sampling::Fields;
use super::stats::Completion;
use anyhow::{Context, Error, Result, bail, ensure};
use futures_util::{AsyncBufReadExt, TryStreamExt};
use http::{Request, StatusCode, Uri, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio_rustls::rustls::crypto::ring;
use tower::Service;

/// Time after which a request counts as failed.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Fields of a request that not all servers know; one that is refused by name is left out from then on.
const OPTIONAL: [&str; 2] = ["ignore_eos", "cache_salt"];

/// An OpenAI-compatible server.
#[derive(Debug)]
pub struct Api {
    connector: HttpsConnector<HttpConnector>,
    /// Path prefix before `/v1`.
    base: String,
    /// The first model that it serves.
    model: Model,
    engines: Option<usize>,
    /// Which fields of [`OPTIONAL`] it has refused.
    refused: [AtomicBool; OPTIONAL.len()],
}

/// A response with a status other than 200.
#[derive(Debug, thiserror::Error)]
#[error("HTTP {}: {text}", .status.as_u16())]
struct Status {
    status: StatusCode,
    /// Start of its body.
    text: String,
}

/// The fields of a chunk that are used; `C` has those of a choice.
#[derive(Deserialize)]
#[serde(bound = "C: DeserializeOwned")]
struct Chunk<C> {
    #[serde(default = "Vec::new")]
    choices: Vec<C>,
    usage: Option<Usage>,
    error: Option<Value>,
}

/// Token counts of the server.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Usage {
    /// Number of prompt tokens, if the server says.
    pub(super) prompt_tokens: Option<usize>,
    /// Number of generated tokens.
    pub(super) completion_tokens: usize,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Clone, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<usize>,
}

impl Usage {
    /// Number of prompt tokens found in the prefix cache, if the server says.
    pub(super) fn cached_tokens(&self) -> Option<usize> {
        self.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens)
    }
}

/// Times and token counts of a stream.
pub(super) struct Streamed {
    /// Time just before the request was sent.
    pub(super) start: Instant,
    /// Arrival times of the events with a token, since `start`.
    pub(super) stamps: Vec<Duration>,
    /// Time from `start` to the end of the stream.
    pub(super) end: Duration,
    /// Token counts, if the server reports them.
    pub(super) usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Debug, Default, Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<usize>,
}

/// The fields of PegaInfer's `/load` that are used. Other servers' have no `kv_cache_free`.
#[derive(Deserialize)]
struct Load {
    #[serde(rename = "kv_cache_free")]
    _kv_cache_free: f64,
    /// Missing if there is one.
    #[serde(default)]
    engines: Vec<IgnoredAny>,
}

impl Api {
    /// Connects to the server at `url`, `http://host:port` or `https://host` with an optional path, and fetches its model name.
    pub async fn connect(url: &str) -> Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("--url {url} is not a URL"))?;
        let (Some(scheme @ ("http" | "https")), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            bail!("--url {url} must begin with http:// or https:// and name a host");
        };
        let path = uri.path().trim_end_matches('/');
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let tls = HttpsConnectorBuilder::new().with_provider_and_webpki_roots(ring::default_provider())?;
        let mut api = Self {
            connector: tls.https_or_http().enable_http1().wrap_connector(tcp),
            base: format!("{scheme}://{authority}{}", path.strip_suffix("/v1").unwrap_or(path)),
            model: Model::default(),
            engines: None,
            refused: Default::default(),
        };
        let fetch = async |body: Incoming| {
            let models: Models = serde_json::from_slice(&body.collect().await?.to_bytes())
                .context("/v1/models is not a list of models")?;
            models.data.into_iter().next().context("it serves no model")
        };
        let model = api.send("GET", "/v1/models", String::new(), fetch).await;
        api.model = model.with_context(|| format!("the server at {url} cannot be measured"))?;
        let fetch = async |body: Incoming| {
            let load: Load = serde_json::from_slice(&body.collect().await?.to_bytes())?;
            anyhow::Ok(load)
        };
        let load = api.send("GET", "/load", String::new(), fetch).await;
        api.engines = load.ok().map(|load| load.engines.len().max(1));
        Ok(api)
    }

    /// Number of its engines, each with a copy of the model, if the server says.
    pub fn engines(&self) -> Option<usize> {
        self.engines
    }

    /// Longest context of the model, in tokens, if the server says.
    pub fn max_model_len(&self) -> Option<usize> {
        self.model.max_model_len
    }

    /// Name of the measured model.
    pub fn model(&self) -> &str {
        &self.model.id
    }

    /// True unless the server has refused `field`, one of the fields that may be left out.
    pub fn takes(&self, field: &str) -> bool {
        let mut optional = OPTIONAL.iter().zip(&self.refused);
        !optional.any(|(name, refused)| *name == field && refused.load(Ordering::Relaxed))
    }

    /// Completes one prompt, greedily and ignoring EOS unless `fields` say otherwise. `salt` keeps the prompts of other
    /// runs out of the prefix cache.
    pub async fn complete(&self, prompt: &[u32], max_tokens: usize, salt: u64, fields: &Fields) -> Result<Completion> {
        let body = json!({"prompt": prompt});
        let any = |_: IgnoredAny| true;
        let streamed = self.generate("/v1/completions", body, (max_tokens, salt, fields), any).await?;
        let Streamed { start, stamps, usage, .. } = streamed;
        ensure!(!stamps.is_empty(), "the stream had no token");
        let cached = usage.as_ref().and_then(Usage::cached_tokens).unwrap_or(0);
        let tokens = usage.map_or(stamps.len(), |u| u.completion_tokens);
        Ok(Completion { start, stamps, prompt: prompt.len(), asked: max_tokens, tokens, cached })
    }

    /// Streams the answer to `body`, a prompt to which the other fields are added. `on_choice` gets each streamed choice
    /// and returns true if it has a token. A server that refuses ignore_eos or the salt is asked again without it.
    pub(super) async fn generate<C: DeserializeOwned>(
        &self,
        path: &str,
        mut body: Value,
        (max_tokens, salt, fields): (usize, u64, &Fields),
        mut on_choice: impl FnMut(C) -> bool,
    ) -> Result<Streamed> {
        let common = json!({
            "model": self.model.id, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true}, "cache_salt": format!("{salt:016x}"),
        });
        common.as_object().into_iter().flatten().for_each(|(name, value)| body[name.as_str()] = value.clone());
        fields.iter().for_each(|(name, value)| body[name.as_str()] = value.clone());
        loop {
            self.leave_out(&mut body);
            let attempt = self.stream(path, body.to_string(), &mut on_choice);
            let streamed = match tokio::time::timeout(TIMEOUT, attempt).await {
                Ok(streamed) => streamed,
                Err(_) => bail!("no end of the stream after {} s", TIMEOUT.as_secs()),
            };
            match streamed {
                Err(error) if self.learn(&body, &error) => {}
                streamed => return streamed,
            }
        }
    }

    /// Removes the fields that the server has refused.
    fn leave_out(&self, body: &mut Value) {
        for (name, refused) in OPTIONAL.iter().zip(&self.refused) {
            if let Some(fields) = body.as_object_mut().filter(|_| refused.load(Ordering::Relaxed)) {
                fields.remove(*name);
            }
        }
    }

    /// Whether the server has refused a field of `body` that may be left out; it is then left out.
    fn learn(&self, body: &Value, error: &anyhow::Error) -> bool {
        let Some(status) = error.downcast_ref::<Status>().filter(|it| matches!(it.status.as_u16(), 400 | 422)) else {
            return false;
        };
        let named = |(name, _): &(&&str, _)| body.get(**name).is_some() && status.text.contains(**name);
        let Some((name, refused)) = OPTIONAL.iter().zip(&self.refused).find(named) else { return false };
        if !refused.swap(true, Ordering::Relaxed) {
            log::info!("the server does not know {name}, it is left out");
        }
        true
    }

    async fn stream<C: DeserializeOwned>(
        &self,
        path: &str,
        body: String,
        on_choice: &mut impl FnMut(C) -> bool,
    ) -> Result<Streamed> {
        let start = Instant::now();
        let (mut stamps, mut usage) = (Vec::new(), None);
        let read = async |body: Incoming| {
            let mut lines = body.into_data_stream().map_err(io::Error::other).into_async_read().lines();
            loop {
                let line = lines.try_next().await?.context("the stream ended before [DONE]")?;
                let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
                let now = start.elapsed();
                if data == "[DONE]" {
                    return Ok(());
                }
                let chunk: Chunk<C> = serde_json::from_str(data).context("an event of the stream is not a chunk")?;
                if let Some(error) = chunk.error {
                    bail!("the server sent an error: {error}");
                }
                let tokens = chunk.choices.into_iter().filter_map(|choice| on_choice(choice).then_some(())).count();
                if tokens > 0 {
                    stamps.push(now);
                }
                usage = chunk.usage.or(usage.take());
            }
        };
        self.send("POST", path, body, read).await?;
        Ok(Streamed { start, stamps, end: start.elapsed(), usage })
    }

    /// Sends a request and reads the body of the response; the status must be 200. The task that reads also drives the
    /// connection, so that no other thread delays what it reads.
    async fn send<T>(
        &self,
        method: &str,
        path: &str,
        body: String,
        read: impl AsyncFnOnce(Incoming) -> Result<T>,
    ) -> Result<T> {
        let uri: Uri = format!("{}{path}", self.base).parse()?;
        let host = uri.authority().map_or("", |authority| authority.as_str()).to_owned();
        let target = uri.path().to_owned();
        let io = self.connector.clone().call(uri).await.map_err(Error::from_boxed).context("no connection")?;
        let (mut sender, connection) = http1::handshake(io).await?;
        let request = Request::builder().method(method).uri(target);
        let request = request.header(header::HOST, host).header(header::CONNECTION, "close");
        let request = request.header(header::CONTENT_TYPE, "application/json").body(body)?;
        let exchange = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            if status != StatusCode::OK {
                let body = response.into_body().collect().await?.to_bytes();
                bail!(Status { status, text: String::from_utf8_lossy(&body).chars().take(300).collect() });
            }
            read(response.into_body()).await
        };
        tokio::select! {
            biased;
            // The end of the connection is not that of the exchange, which may have more to read.
            never = async { _ = connection.await; std::future::pending().await } => never,
            result = exchange => result,
        }
    }
}
