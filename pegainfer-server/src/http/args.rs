//! Flags of the HTTP side.

use super::{ApiKeys, Cors, Options, Tls};
use crate::cli::parse_bytes;
use crate::trace::{ChromeFiles, Otlp, Tracer};
use anyhow::{Context, Result};
use clap::Args;
use fastrace::collector::Reporter;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A value that is never printed.
#[derive(Clone)]
pub struct Secret(pub String);

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self(value)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Flags of the HTTP side of `serve`.
#[derive(Debug, Clone, Args)]
pub struct HttpArgs {
    /// Clients must send this key, as in `Authorization: Bearer KEY`; give it again for more keys. Other users of this
    /// machine see it in the list of processes: --api-key-file is safer
    #[arg(long, value_name = "KEY", value_parser = clap::value_parser!(Secret))]
    pub api_key: Vec<Secret>,
    /// File with one such key on each line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Web page that may call the API from a browser, such as https://chat.example.com, or * for all; repeatable
    #[arg(long, value_name = "ORIGIN")]
    pub cors_allow_origin: Vec<String>,
    /// Largest request body, such as 512K or 8M
    #[arg(long, value_name = "BYTES", default_value = "8M", value_parser = parse_bytes)]
    pub max_body_size: u64,
    /// Cancel requests that take longer; clients may ask for less in the header x-request-timeout [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub request_timeout: Option<Duration>,
    /// Close connections whose client neither sends nor reads for this long
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub client_timeout: Duration,
    /// After SIGTERM, open requests have this long to finish
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    pub drain_timeout: Duration,
    /// Serve HTTPS with this certificate chain (PEM, the server's own certificate first)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM, without password)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Write the stages of each request (queue, prefill, decode, ..) into files here, which ui.perfetto.dev opens
    #[arg(long, value_name = "DIR")]
    pub trace_dir: Option<PathBuf>,
    /// Send the same to an OpenTelemetry collector, such as http://127.0.0.1:4318 (OTLP, JSON over HTTP)
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Trace only this share of the requests, and those that send `x-trace: 1`
    #[arg(long, value_name = "SHARE", default_value = "1", value_parser = parse_trace_share)]
    pub trace_share: f64,
}

impl HttpArgs {
    fn tracer(&self) -> Result<Option<Arc<Tracer>>> {
        let mut reporters: Vec<Box<dyn Reporter>> = Vec::new();
        if let Some(dir) = &self.trace_dir {
            reporters.push(Box::new(ChromeFiles::create(dir)?));
        }
        if let Some(endpoint) = &self.otlp_endpoint {
            reporters.push(Box::new(Otlp::new(endpoint)?));
        }
        if reporters.is_empty() {
            return Ok(None);
        }
        let tracer = Tracer::start(reporters, self.trace_share);
        Ok(Some(tracer.context("the thread that writes traces cannot be started")?))
    }

    /// The flags, checked, with the keys read from their file.
    pub fn options(&self, strict: bool) -> Result<Options> {
        Ok(Options {
            strict,
            api_keys: ApiKeys::load(&self.api_key, self.api_key_file.as_deref())?,
            cors: Cors::new(&self.cors_allow_origin)?,
            max_body: usize::try_from(self.max_body_size)?,
            request_timeout: self.request_timeout,
            client_timeout: self.client_timeout,
            drain_timeout: self.drain_timeout,
            tls: self.tls_cert.as_deref().zip(self.tls_key.as_deref()).map(|(c, k)| Tls::load(c, k)).transpose()?,
            tracer: self.tracer()?,
        })
    }
}

/// From 0 to 1.
fn parse_trace_share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("{text:?} is not a share such as 0.01, from 0 to 1"))
}

/// A number of seconds above 0, perhaps with a fraction; at most a year.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    const YEAR: f64 = 365.0 * 24.0 * 3600.0;
    match text.trim().parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= YEAR => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("{:?} is not a number of seconds, such as 30 or 0.5", crate::openai::echo(text))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds() {
        assert_eq!(parse_seconds("2.5"), Ok(Duration::from_millis(2500)));
        for bad in ["", "0", "-1", "1s", "nan", "inf", "1e9"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn keys_do_not_show_in_the_flags() {
        let key = Secret::from("sk-1".to_string());
        assert!(!format!("{key:?}").contains("sk-1"));
    }
}
