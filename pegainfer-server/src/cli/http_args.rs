//! Command-line flags of the HTTP server.

use crate::api::ImageFetcher;
use crate::app::Options;
use crate::http::{AllowedHosts, ApiKeys, Cors, Secret, Tls, TrustedProxies};
use crate::image_hosts::ImageHost;
use crate::keyed_hash::KeyedHash;
use crate::limits::Limits;
use crate::text_service::{GrammarLimits, GrammarTrial};
use crate::trace::{ChromeFiles, Otlp, Tracer};
use anyhow::{Context, Result};
use clap::Args;
use fastrace::collector::Reporter;
use pegainfer_terminal::values::{parse_bytes, parse_seconds};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Flags of the HTTP server.
#[derive(Debug, Clone, Args)]
pub struct HttpArgs {
    /// Key that clients must send, as in `Authorization: Bearer KEY`; repeatable. It is visible in the process list:
    /// --api-key-file or the variable PEGAINFER_API_KEY is safer
    #[arg(long, value_name = "KEY", value_parser = clap::value_parser!(Secret))]
    pub api_key: Vec<Secret>,
    /// File with one API key on each line, with optional limits a minute, such as `KEY rpm=60 tpm=100000`, and the only
    /// LoRA adapters that it may use, such as `adapters=sql,support`; read again on SIGHUP
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Key of an admin, who may also reset the prefix cache and trace requests; repeatable
    #[arg(long, value_name = "KEY", value_parser = clap::value_parser!(Secret))]
    pub admin_key: Vec<Secret>,
    /// File with one admin key on each line; read again on SIGHUP
    #[arg(long, value_name = "FILE")]
    pub admin_key_file: Option<PathBuf>,
    /// Make programs on this machine admins if no keys are set; unsafe next to a proxy that serves others
    #[arg(long)]
    pub admin_local: bool,
    /// Proxies trusted to name their client in X-Forwarded-For or Forwarded, such as 10.0.0.0/8; repeatable, or
    /// separated by commas
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    pub trusted_proxy: Vec<String>,
    /// Host name under which clients may call the server, or * for all; repeatable. IP addresses and localhost are
    /// always allowed [default: none if --host is a loopback address, else all]
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Fetch images from these hosts if a request has their http or https URL: example.com, *.example.com, or * for any
    /// public host; addresses and networks such as 10.0.0.0/8 may be private; repeatable, or separated by commas
    /// [default: fetch none]
    #[arg(long, value_name = "HOSTS", value_delimiter = ',', value_parser = ImageHost::parse)]
    pub allowed_image_hosts: Vec<ImageHost>,
    /// Origin of web pages that may call the API, such as https://chat.example.com, or * for all; repeatable
    #[arg(long, value_name = "ORIGIN")]
    pub cors_allow_origin: Vec<String>,
    /// Treat control tokens in messages, such as <|im_end|>, as plain text, so that no message can end its own turn
    #[arg(long)]
    pub plain_messages: bool,
    /// Maximum size of a request body, such as 512K or 8M [default: 8M, or 64M if a loaded model reads images]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_body_size: Option<u64>,
    /// Cancel requests that take longer; clients may ask for less with the header x-request-timeout [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub request_timeout: Option<Duration>,
    /// Close connections without traffic from the client for this long
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub client_timeout: Duration,
    /// Send a comment into a stream that is silent for this long, so that proxies do not close it
    #[arg(long, value_name = "SECONDS", default_value = "15", value_parser = parse_seconds)]
    pub keep_alive_interval: Duration,
    /// Time that open requests have to finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    pub drain_timeout: Duration,
    /// CPU time for compiling the grammar of one request, in whole seconds; more is refused
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub max_grammar_time: Duration,
    /// Memory for the grammar of one request; all together may take twice as much
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = parse_bytes)]
    pub max_grammar_memory: u64,
    /// Serve HTTPS with this certificate chain (PEM, the server's own certificate first); read again on SIGHUP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM, without password)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Write traces of requests to this directory, for ui.perfetto.dev; with --ledger also of slow steps
    #[arg(long, value_name = "DIR")]
    pub trace_dir: Option<PathBuf>,
    /// Maximum size of all trace files in --trace-dir together; the oldest ones are deleted
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_bytes)]
    pub trace_max_bytes: u64,
    /// Send traces to this OpenTelemetry collector (OTLP, JSON over HTTP), such as http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Fraction of the requests to trace, from 0 to 1; admins decide for a request with `x-trace: 1` or 0
    #[arg(long, alias = "trace-share", value_name = "RATIO", default_value = "1", value_parser = parse_sampling_ratio)]
    pub trace_sampling_ratio: f64,
    /// Flags that limit what requests may take.
    #[command(flatten)]
    pub limits: Limits,
}

impl HttpArgs {
    fn tracer(&self) -> Result<Option<Arc<Tracer>>> {
        let mut reporters: Vec<Box<dyn Reporter>> = Vec::new();
        if let Some(dir) = &self.trace_dir {
            reporters.push(Box::new(ChromeFiles::create(dir, self.trace_max_bytes)?));
        }
        if let Some(endpoint) = &self.otlp_endpoint {
            reporters.push(Box::new(Otlp::new(endpoint)?));
        }
        if reporters.is_empty() {
            return Ok(None);
        }
        let tracer = Tracer::start(reporters, self.trace_sampling_ratio);
        Ok(Some(tracer.context("the thread that writes traces cannot be started")?))
    }

    fn grammar_trial(&self) -> Result<GrammarTrial> {
        let limits = GrammarLimits { memory: self.max_grammar_memory, time: self.max_grammar_time };
        GrammarTrial::this_program(limits).context("the path of this program is unknown")
    }

    fn image_fetcher(&self) -> Result<Option<ImageFetcher>> {
        let hosts = &self.allowed_image_hosts;
        let fetcher = (!hosts.is_empty()).then(|| ImageFetcher::new(hosts)).transpose();
        fetcher.context("--allowed-image-hosts: TLS cannot be set up")
    }

    /// Checks the flags and reads the keys from their files. `local` is true if the server is bound to a loopback
    /// address.
    pub fn options(&self, strict: bool, local: bool) -> Result<Options> {
        Ok(Options {
            strict,
            plain_messages: self.plain_messages,
            normalize_prompts: true,
            api_keys: ApiKeys::load(&self.api_key, self.api_key_file.as_deref())?,
            admin_keys: ApiKeys::load_admin(&self.admin_key, self.admin_key_file.as_deref())?,
            admin_local: self.admin_local,
            trusted_proxies: TrustedProxies::new(&self.trusted_proxy)?,
            allowed_hosts: AllowedHosts::new(&self.allowed_host, local)?,
            cors: Cors::new(&self.cors_allow_origin)?,
            max_body: self.max_body_size.map(usize::try_from).transpose()?,
            request_timeout: self.request_timeout,
            client_timeout: self.client_timeout,
            keep_alive_interval: self.keep_alive_interval,
            drain_timeout: self.drain_timeout,
            tls: self.tls_cert.as_deref().zip(self.tls_key.as_deref()).map(|(c, k)| Tls::load(c, k)).transpose()?,
            tracer: self.tracer()?,
            grammar_trial: Some(self.grammar_trial()?),
            recorder: None,
            adapters: None,
            image_fetcher: self.image_fetcher()?,
            limits: self.limits.clone(),
            hasher: KeyedHash::default(),
        })
    }
}

/// Parses a ratio from 0 to 1.
fn parse_sampling_ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
    ratio.ok_or_else(|| format!("{text:?} is not a ratio such as 0.01, from 0 to 1"))
}
