//! A low-latency client of `/v1/completions`: HTTP/1.1 and server-sent events directly on a socket, one connection per
//! request.

use super::sampling::Fields;
use super::stats::Completion;
use anyhow::{Context, Result, bail, ensure};
use http::Uri;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// Time after which a request counts as failed.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum bytes of a header line or of a chunk.
const MAX_PART: usize = 64 << 20;
/// Fields of a request that not all servers know; one that is refused by name is left out from then on.
const OPTIONAL: [&str; 2] = ["ignore_eos", "cache_salt"];

/// An OpenAI-compatible server.
#[derive(Debug)]
pub struct Api {
    /// `host:port`.
    authority: String,
    /// Path prefix before `/v1`.
    base: String,
    /// The first model that it serves.
    model: Model,
    /// Which fields of [`OPTIONAL`] it has refused.
    refused: [AtomicBool; OPTIONAL.len()],
}

/// A response whose status is not 200.
#[derive(Debug, Error)]
#[error("HTTP {status}: {text}")]
struct Status {
    status: u16,
    /// Start of its body.
    text: String,
}

/// The fields of a chunk that are used.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<IgnoredAny>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: usize,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<usize>,
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

impl Api {
    /// Connects to the server at `url`, `http://host:port` with an optional path, and fetches its model name.
    pub async fn connect(url: &str) -> Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("--url {url} is not a URL"))?;
        let (Some("http"), Some(host)) = (uri.scheme_str(), uri.host()) else {
            bail!("--url {url} must begin with http:// and name a host; https is not supported");
        };
        let path = uri.path().trim_end_matches('/');
        let mut api = Self {
            authority: format!("{host}:{}", uri.port_u16().unwrap_or(80)),
            base: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            model: Model::default(),
            refused: Default::default(),
        };
        let fetch = async || {
            let body = api.send("GET", "/v1/models", b"").await?.rest().await?;
            let models: Models = serde_json::from_slice(&body).context("/v1/models is not a list of models")?;
            models.data.into_iter().next().context("it serves no model")
        };
        api.model = fetch().await.with_context(|| format!("the server at {url} cannot be measured"))?;
        Ok(api)
    }

    /// Longest context of the model, in tokens, if the server says.
    pub fn max_model_len(&self) -> Option<usize> {
        self.model.max_model_len
    }

    /// Completes one prompt, greedily and ignoring EOS unless `fields` say otherwise. `salt` keeps the prompts of other runs
    /// out of the prefix cache. A server that refuses ignore_eos or the salt is asked again without it; what is returned
    /// is of the last attempt.
    pub async fn complete(&self, prompt: &[u32], max_tokens: usize, salt: u64, fields: &Fields) -> Result<Completion> {
        let mut body = json!({
            "model": self.model.id, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true}, "cache_salt": format!("{salt:016x}"),
        });
        fields.iter().for_each(|(name, value)| body[name.as_str()] = value.clone());
        loop {
            self.leave_out(&mut body);
            let text = body.to_string();
            let completion = match tokio::time::timeout(TIMEOUT, self.stream(text.as_bytes())).await {
                Ok(completion) => completion,
                Err(_) => bail!("no end of the stream after {} s", TIMEOUT.as_secs()),
            };
            match completion {
                Err(error) if self.learn(&body, &error) => {}
                completion => return completion.map(|it| Completion { prompt: prompt.len(), asked: max_tokens, ..it }),
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
        let Some(status) = error.downcast_ref::<Status>().filter(|it| matches!(it.status, 400 | 422)) else {
            return false;
        };
        let named = |(name, _): &(&&str, _)| body.get(**name).is_some() && status.text.contains(**name);
        let Some((name, refused)) = OPTIONAL.iter().zip(&self.refused).find(named) else { return false };
        if !refused.swap(true, Ordering::Relaxed) {
            log::info!("the server does not know {name}, it is left out");
        }
        true
    }

    async fn stream(&self, body: &[u8]) -> Result<Completion> {
        let start = Instant::now();
        let mut response = self.send("POST", "/v1/completions", body).await?;
        let (mut stamps, mut usage) = (Vec::new(), None);
        loop {
            let line = response.line().await?.context("the stream ended before [DONE]")?;
            let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { continue };
            let now = start.elapsed();
            if data == b"[DONE]" {
                break;
            }
            let chunk: Chunk = serde_json::from_slice(data).context("an event of the stream is not a chunk")?;
            if let Some(error) = chunk.error {
                bail!("the server sent an error: {error}");
            }
            if !chunk.choices.is_empty() {
                stamps.push(now);
            }
            usage = chunk.usage.or(usage);
        }
        ensure!(!stamps.is_empty(), "the stream had no token");
        let details = usage.as_ref().and_then(|u| u.prompt_tokens_details.as_ref());
        let cached = details.and_then(|d| d.cached_tokens).unwrap_or(0);
        let tokens = usage.map_or(stamps.len(), |u| u.completion_tokens);
        Ok(Completion { start, stamps, prompt: 0, asked: 0, tokens, cached })
    }

    /// Sends a request and reads the head of the response, whose status must be 200.
    async fn send(&self, method: &str, path: &str, body: &[u8]) -> Result<Response> {
        let mut stream = TcpStream::connect(&self.authority).await.context("no connection")?;
        stream.set_nodelay(true)?;
        let Self { authority, base, .. } = self;
        let head = format!(
            "{method} {base}{path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).await?;
        let mut response = Response { reader: BufReader::new(stream), chunked: false, pending: Vec::new() };
        let status = response.head().await?;
        if status != 200 {
            let body = response.rest().await?;
            let text: String = String::from_utf8_lossy(&body).chars().take(300).collect();
            bail!(Status { status, text });
        }
        Ok(response)
    }
}

/// A response whose body may not have arrived yet.
struct Response {
    reader: BufReader<TcpStream>,
    /// Whether the body is chunked; otherwise it ends with the connection.
    chunked: bool,
    /// Bytes of the body that were received but not read yet.
    pending: Vec<u8>,
}

impl Response {
    /// Reads the status line and the headers; returns the status.
    async fn head(&mut self) -> Result<u16> {
        let first = self.head_line().await?;
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.with_context(|| format!("{first:?} is not an HTTP response"))?;
        loop {
            let line = self.head_line().await?.to_ascii_lowercase();
            if line.is_empty() {
                return Ok(status);
            }
            self.chunked |= line.strip_prefix("transfer-encoding:").is_some_and(|coding| coding.trim() == "chunked");
        }
    }

    /// Reads a line of the head, or the size line of a chunk.
    async fn head_line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = (&mut self.reader).take(MAX_PART as u64).read_line(&mut line).await?;
        ensure!(read > 0, "the connection was closed");
        Ok(line.trim_end().to_owned())
    }

    /// Receives more of the body; false at its end.
    async fn receive(&mut self) -> Result<bool> {
        if !self.chunked {
            return Ok(self.reader.read_buf(&mut self.pending).await? > 0);
        }
        let line = self.head_line().await?;
        let digits = line.split(';').next().unwrap_or_default();
        let size = usize::from_str_radix(digits, 16).with_context(|| format!("{line:?} is not the size of a chunk"))?;
        ensure!(size <= MAX_PART, "a chunk of {size} bytes");
        if size == 0 {
            return Ok(false);
        }
        let end = self.pending.len() + size;
        // A chunk ends with a line break of its own.
        self.pending.resize(end + 2, 0);
        let from = end - size;
        self.reader.read_exact(&mut self.pending[from..]).await?;
        self.pending.truncate(end);
        Ok(true)
    }

    /// The next line of the body, including its line break; `None` after the last one.
    async fn line(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.pending.iter().position(|&byte| byte == b'\n') {
                let rest = self.pending.split_off(at + 1);
                return Ok(Some(std::mem::replace(&mut self.pending, rest)));
            }
            if !self.receive().await? {
                return Ok(None);
            }
        }
    }

    /// The rest of the body.
    async fn rest(mut self) -> Result<Vec<u8>> {
        while self.receive().await? {}
        Ok(self.pending)
    }
}
