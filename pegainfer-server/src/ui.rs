//! The web UI at `/`: a chat with settings and charts, in plain files embedded in the binary.
//!
//! It calls only the server's own public API, which its `Content-Security-Policy` enforces.

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::hash::{DefaultHasher, Hash, Hasher};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

/// Path, content type and text of each file.
const FILES: &[(&str, &str, &str)] = &[
    ("/", HTML, include_str!("../ui/index.html")),
    ("/ui/style.css", CSS, include_str!("../ui/style.css")),
    ("/ui/message.css", CSS, include_str!("../ui/message.css")),
    ("/ui/markdown.css", CSS, include_str!("../ui/markdown.css")),
    ("/ui/panel.css", CSS, include_str!("../ui/panel.css")),
    ("/ui/icon.svg", SVG, include_str!("../ui/icon.svg")),
    ("/ui/theme.js", JAVASCRIPT, include_str!("../ui/theme.js")),
    ("/ui/api.js", JAVASCRIPT, include_str!("../ui/api.js")),
    ("/ui/app.js", JAVASCRIPT, include_str!("../ui/app.js")),
    ("/ui/attachments.js", JAVASCRIPT, include_str!("../ui/attachments.js")),
    ("/ui/body.js", JAVASCRIPT, include_str!("../ui/body.js")),
    ("/ui/charts.js", JAVASCRIPT, include_str!("../ui/charts.js")),
    ("/ui/chat.js", JAVASCRIPT, include_str!("../ui/chat.js")),
    ("/ui/clipboard.js", JAVASCRIPT, include_str!("../ui/clipboard.js")),
    ("/ui/current.js", JAVASCRIPT, include_str!("../ui/current.js")),
    ("/ui/dom.js", JAVASCRIPT, include_str!("../ui/dom.js")),
    ("/ui/drawers.js", JAVASCRIPT, include_str!("../ui/drawers.js")),
    ("/ui/follow.js", JAVASCRIPT, include_str!("../ui/follow.js")),
    ("/ui/formulas.js", JAVASCRIPT, include_str!("../ui/formulas.js")),
    ("/ui/highlight.js", JAVASCRIPT, include_str!("../ui/highlight.js")),
    ("/ui/history.js", JAVASCRIPT, include_str!("../ui/history.js")),
    ("/ui/icons.js", JAVASCRIPT, include_str!("../ui/icons.js")),
    ("/ui/images.js", JAVASCRIPT, include_str!("../ui/images.js")),
    ("/ui/key.js", JAVASCRIPT, include_str!("../ui/key.js")),
    ("/ui/languages.js", JAVASCRIPT, include_str!("../ui/languages.js")),
    ("/ui/latex-commands.js", JAVASCRIPT, include_str!("../ui/latex-commands.js")),
    ("/ui/latex-nodes.js", JAVASCRIPT, include_str!("../ui/latex-nodes.js")),
    ("/ui/latex-source.js", JAVASCRIPT, include_str!("../ui/latex-source.js")),
    ("/ui/latex-symbols.js", JAVASCRIPT, include_str!("../ui/latex-symbols.js")),
    ("/ui/latex.js", JAVASCRIPT, include_str!("../ui/latex.js")),
    ("/ui/markdown.js", JAVASCRIPT, include_str!("../ui/markdown.js")),
    ("/ui/message.js", JAVASCRIPT, include_str!("../ui/message.js")),
    ("/ui/models.js", JAVASCRIPT, include_str!("../ui/models.js")),
    ("/ui/segments.js", JAVASCRIPT, include_str!("../ui/segments.js")),
    ("/ui/settings.js", JAVASCRIPT, include_str!("../ui/settings.js")),
    ("/ui/steps.js", JAVASCRIPT, include_str!("../ui/steps.js")),
    ("/ui/storage.js", JAVASCRIPT, include_str!("../ui/storage.js")),
    ("/ui/store.js", JAVASCRIPT, include_str!("../ui/store.js")),
    ("/ui/tokens.js", JAVASCRIPT, include_str!("../ui/tokens.js")),
    ("/ui/transcript.js", JAVASCRIPT, include_str!("../ui/transcript.js")),
    ("/ui/words.js", JAVASCRIPT, include_str!("../ui/words.js")),
    ("/ui/vendor/marked.js", JAVASCRIPT, include_str!("../ui/vendor/marked.js")),
    ("/ui/vendor/marked.LICENSE.txt", TEXT, include_str!("../ui/vendor/marked.LICENSE.txt")),
];

/// Allows only this server's files as scripts, styles and requests, and images of messages as data URLs. Model output is
/// shown as text, and could not run even if a bug inserted it as markup.
const POLICY: &str = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'; object-src 'none'";

/// The routes of the web UI: `/` and `/ui/...`.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.iter().fold(Router::new(), |router, &(path, content_type, text)| {
        let tag = entity_tag(text);
        router.route(path, get(move |headers: HeaderMap| async move { serve(&headers, content_type, text, &tag) }))
    })
}

/// Responds with a file, or with 304 if the browser has it. `no-cache` makes browsers revalidate each time, because a
/// new binary serves other files under the same names.
fn serve(request: &HeaderMap, content_type: &'static str, text: &'static str, tag: &str) -> Response {
    let mut response =
        if matches_tag(request, tag) { StatusCode::NOT_MODIFIED.into_response() } else { text.into_response() };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(tag) = HeaderValue::from_str(tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

/// True if `If-None-Match` lists the tag.
fn matches_tag(request: &HeaderMap, tag: &str) -> bool {
    let listed = request.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    // A compressing proxy makes the tag weak.
    listed.flat_map(|list| list.split(',')).any(|held| held.trim().trim_start_matches("W/") == tag)
}

/// Entity tag of a file: a hash of its text, constant for one binary.
fn entity_tag(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}
