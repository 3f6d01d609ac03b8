//! The application: the API behind the middleware of the HTTP server. Only this module knows both.

use crate::adapters::Adapters;
use crate::api::{self, ApiOptions, AppState, ImageFetcher};
use crate::api_style::ApiStyle;
use crate::budget::Budget;
use crate::http::guard::{Guard, Throttle};
use crate::http::{self, Access, AllowedHosts, ApiKeys, Cors, Ports, Server, Tls, TrustedProxies};
use crate::http::{cors, deadline, error_shape, guard, hosts, request_id};
use crate::keyed_hash::KeyedHash;
use crate::lifecycle::Lifecycle;
use crate::limits::Limits;
use crate::metrics::{Metrics, access};
use crate::models::{Model, Models, Text};
use crate::record::Recorder;
use crate::text_service::{Checkpoint, GrammarTrial};
use crate::trace::{self, Tracer};
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use pegainfer_core::engine::EngineHandle;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Server options, set by the operator.
#[derive(Debug, Clone)]
pub struct Options {
    /// True if unknown request fields are refused.
    pub strict: bool,
    /// True if volatile parts of known agents' prompts are left out.
    pub normalize_prompts: bool,
    /// API keys; if empty, everyone may call.
    pub api_keys: ApiKeys,
    /// Keys of admins, who may also reset the prefix cache and trace requests.
    pub admin_keys: ApiKeys,
    /// True if local callers are admins while there are no keys.
    pub admin_local: bool,
    /// Proxies whose forwarding headers are trusted.
    pub trusted_proxies: TrustedProxies,
    /// Names under which clients may call the server.
    pub allowed_hosts: AllowedHosts,
    /// Origins of web pages that may call the API.
    pub cors: Cors,
    /// True if control tokens in messages are treated as plain text.
    pub plain_messages: bool,
    /// Maximum size of a request body, in bytes; `None` for the default, which depends on what the models read.
    pub max_body: Option<usize>,
    /// Time after which a request is cancelled.
    pub request_timeout: Option<Duration>,
    /// Maximum time for which a client may be inactive: sends no byte of a body, reads no byte of a response, or does
    /// not complete the head of its next request.
    pub client_timeout: Duration,
    /// Maximum time for which a stream sends nothing.
    pub keep_alive_interval: Duration,
    /// Time that open requests have to finish after a signal to stop.
    pub drain_timeout: Duration,
    /// Certificate and key; `None` serves plain HTTP.
    pub tls: Option<Tls>,
    /// Tracer of request stages; `None` traces nothing.
    pub tracer: Option<Arc<Tracer>>,
    /// Tries to compile grammars within limits; `None` only checks their sources.
    pub grammar_trial: Option<GrammarTrial>,
    /// Records requests; `None` if the server does not record.
    pub recorder: Option<Arc<Recorder>>,
    /// Fetches images from other servers; `None` if it may not.
    pub image_fetcher: Option<ImageFetcher>,
    /// Limits on requests.
    pub limits: Limits,
    /// Hashes keys, addresses and salts.
    pub hasher: KeyedHash,
    /// Adapters that requests may name; `None` if they are not enabled.
    pub adapters: Option<Arc<Adapters>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            strict: false,
            plain_messages: false,
            normalize_prompts: true,
            api_keys: ApiKeys::default(),
            admin_keys: ApiKeys::default(),
            admin_local: false,
            trusted_proxies: TrustedProxies::default(),
            allowed_hosts: AllowedHosts::default(),
            cors: Cors::default(),
            max_body: None,
            request_timeout: None,
            client_timeout: Duration::from_secs(60),
            keep_alive_interval: Duration::from_secs(15),
            drain_timeout: Duration::from_secs(30),
            tls: None,
            tracer: None,
            grammar_trial: None,
            recorder: None,
            image_fetcher: None,
            limits: Limits::default(),
            hasher: KeyedHash::default(),
            adapters: None,
        }
    }
}

/// The API of the models, ready to be served.
pub struct App {
    state: Arc<AppState>,
    router: Router,
    /// vLLM's gRPC services.
    grpc: Router,
    server: Server,
}

impl App {
    /// The API of one model that has not served a request yet. An empty `names` becomes the checkpoint's own name.
    pub fn new(engine: EngineHandle, checkpoint: Checkpoint, mut names: Vec<String>, options: Options) -> Self {
        if names.is_empty() {
            names.push(checkpoint.name.clone());
        }
        let metrics = Arc::new(Metrics::new(&names[0], options.recorder.clone()));
        let text = Text::new(checkpoint, &engine, options.grammar_trial.clone());
        let model = Model::new(names, engine, text, options.adapters.clone(), None, &metrics);
        Self::of(Models::pinned(model, metrics.clone()), metrics, options)
    }

    /// The API of these models, which have these metrics.
    pub fn of(models: Arc<Models>, metrics: Arc<Metrics>, options: Options) -> Self {
        let Options { strict, plain_messages, normalize_prompts, max_body, request_timeout, client_timeout, .. } =
            options;
        let Options { keep_alive_interval, drain_timeout, .. } = options;
        let lifecycle = Lifecycle::default();
        let Limits { max_connections, min_read_rate, .. } = options.limits;
        let max_connections = max_connections.map_or_else(http::default_max_connections, Into::into);
        let proxies = options.trusted_proxies;
        let (recorder, limits) = (options.recorder, options.limits);
        let api_options = ApiOptions {
            hasher: options.hasher,
            strict,
            plain_messages,
            normalize_prompts,
            max_body,
            client_timeout,
            keep_alive_interval,
            recorder,
            image_fetcher: options.image_fetcher,
            limits,
        };
        let state = AppState::new(models.clone(), metrics.clone(), api_options, lifecycle.clone());
        let guard = Guard {
            access: Access {
                keys: options.api_keys,
                admin_keys: options.admin_keys,
                admin_local: options.admin_local,
                proxies: proxies.clone(),
            },
            lifecycle: lifecycle.clone(),
            metrics: metrics.clone(),
            failures: Throttle::default(),
            hasher: state.hasher.clone(),
        };
        let middleware = Middleware {
            metrics: metrics.clone(),
            cors: options.cors,
            allowed_hosts: options.allowed_hosts,
            guard,
            tracer: options.tracer,
            request_timeout,
        };
        let middleware = Arc::new(middleware);
        let wrapped = |(style, routes): (ApiStyle, Router)| {
            let middleware = middleware.clone();
            routes.layer(from_fn_with_state(Styled { middleware, style }, wrap))
        };
        let router = api::routers(&state).into_iter().map(wrapped).fold(Router::new(), Router::merge);
        let grpc = wrapped((ApiStyle::Grpc, api::grpc_router(&state)));
        let open_requests = Box::new(move || {
            let stats = models.stats();
            stats.running + stats.waiting + models.waiting()
        });
        let server = Server {
            client_timeout,
            min_read_rate,
            output: state.output.clone(),
            metrics,
            proxies,
            drain_timeout,
            tls: options.tls,
            max_connections,
            lifecycle,
            open_requests,
        };
        Self { state, router, grpc, server }
    }

    /// Names that clients may use for the models; the first one is that of requests without a name.
    pub fn names(&self) -> Vec<String> {
        let models = &self.state.models;
        models.ids().into_iter().flat_map(|id| models.names(id)).collect()
    }

    /// Memory of requests that have not reached the engine.
    pub fn budget(&self) -> Arc<Budget> {
        self.state.budget.clone()
    }

    /// The API with its middleware, as a service without connections.
    pub fn router(&self) -> Router {
        self.router.clone()
    }

    /// vLLM's gRPC services with their middleware, as a service without connections.
    pub fn grpc_router(&self) -> Router {
        self.grpc.clone()
    }

    /// Serves HTTP until `stop` is ready, then drains.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        self.serve_ports(listener, None, stop).await;
    }

    /// Resolves when an admin has asked for the end of the server.
    pub fn asked_to_stop(&self) -> impl Future<Output = ()> + Send + 'static {
        self.server.lifecycle.asked_to_stop()
    }

    /// Serves HTTP and, on its own port, gRPC until `stop` is ready, then drains.
    pub async fn serve_ports(self, http: TcpListener, grpc: Option<TcpListener>, stop: impl Future<Output = ()>) {
        let ports = Ports { http: (http, self.router), grpc: grpc.map(|listener| (listener, self.grpc)) };
        http::serve(ports, self.server, stop).await;
    }
}

/// State of the middleware.
struct Middleware {
    metrics: Arc<Metrics>,
    cors: Cors,
    allowed_hosts: AllowedHosts,
    guard: Guard,
    tracer: Option<Arc<Tracer>>,
    request_timeout: Option<Duration>,
}

/// The middleware of one API's routes.
#[derive(Clone)]
struct Styled {
    middleware: Arc<Middleware>,
    style: ApiStyle,
}

/// Wraps the API, innermost function first. Every response gets a request id, and browsers may read refusals. These are
/// nested functions, because each layer of a router is cloned and boxed with everything inside it for every request.
async fn wrap(State(with): State<Styled>, mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(with.style);
    let with = &*with.middleware;
    let next = async move |request| api::catch_panic(request, async move |request| next.run(request).await).await;
    let next = async move |request| deadline::enforce(with.request_timeout, request, next).await;
    let next = async move |request| trace::attach(with.tracer.as_ref(), request, next).await;
    let next = async move |request| guard::guard(&with.guard, request, next).await;
    let next = async move |request| hosts::check(&with.allowed_hosts, request, next).await;
    let next = async move |request| error_shape::reshape(request, next).await;
    let next = async move |request| cors::cors(&with.cors, request, next).await;
    let next = async move |request| access::observe(with.metrics.clone(), request, next).await;
    request_id::attach(request, next).await
}
