//! The files of the web UI over HTTP, as a browser requests them. tools/web-ui-test.py tests the web UI in a browser.

use crate::support::client::{get, send};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn server() -> TestServer {
    TestServer::start(MockEngine::replying(" a cat").0, Setup::default())
}

fn ui_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("ui")
}

/// The files of a folder, without those of its subfolders.
fn files(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file())
}

#[test]
fn every_file_of_the_web_ui_is_served_with_its_type() {
    let server = server();
    for file in files(&ui_dir()).chain(files(&ui_dir().join("vendor"))) {
        let name = file.strip_prefix(ui_dir()).unwrap().to_str().unwrap();
        let path = if name == "index.html" { "/".to_string() } else { format!("/ui/{name}") };
        let response = get(server.address, &path);
        assert_eq!(response.status, 200, "{path}");
        let expected = match name.rsplit_once('.').unwrap().1 {
            "html" => "text/html; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            "js" => "text/javascript; charset=utf-8",
            "svg" => "image/svg+xml",
            "txt" => "text/plain; charset=utf-8",
            other => panic!("no content type for .{other}"),
        };
        assert_eq!(response.header("content-type"), Some(expected), "{path}");
        let policy = response.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'self';") && !policy.contains("unsafe"), "{path}: {policy}");
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(response.text(), std::fs::read_to_string(file).unwrap(), "{path}");
    }
}

#[test]
fn a_file_that_the_browser_holds_is_not_sent_again() {
    let server = server();
    let mut tags = BTreeSet::new();
    for path in ["/", "/ui/app.js", "/ui/style.css"] {
        let first = get(server.address, path);
        assert_eq!(first.header("cache-control"), Some("no-cache"));
        let tag = first.header("etag").unwrap().to_string();
        for held in [tag.clone(), format!("\"other\", W/{tag}")] {
            let again = send(server.address, "GET", path, &[("If-None-Match", &held)], b"");
            assert_eq!((again.status, again.header("etag")), (304, Some(tag.as_str())), "{path}");
            assert_eq!(again.text(), "", "{path}");
        }
        assert_eq!(send(server.address, "GET", path, &[("If-None-Match", "\"other\"")], b"").status, 200);
        assert!(tags.insert(tag), "{path} has the tag of another file");
    }
}

#[test]
fn other_paths_and_methods_get_errors_in_the_shape_of_openai() {
    let server = server();
    for path in ["/ui/", "/ui/nothing.js", "/index.html", "/ui/../Cargo.toml"] {
        let response = get(server.address, path);
        assert_eq!(response.status, 404, "{path}");
        assert_eq!(response.json()["error"]["code"], "unknown_url", "{path}");
    }
    let response = send(server.address, "POST", "/", &[], b"");
    assert_eq!(response.status, 405);
    assert_eq!(response.json()["error"]["type"], "invalid_request_error");
    assert_eq!(send(server.address, "HEAD", "/", &[], b"").status, 200);
}

/// The Content-Security-Policy forbids inline code and other hosts: either would leave the web UI without styles or
/// scripts.
#[test]
fn the_web_ui_has_no_inline_code_and_names_no_other_host() {
    for path in files(&ui_dir()) {
        let text = std::fs::read_to_string(&path).unwrap();
        for forbidden in ["style=\"", "<style", "onclick=", "innerHTML", "eval(", "https://", "url("] {
            assert!(!text.contains(forbidden), "{} holds {forbidden}", path.display());
        }
        let hosts = text.matches("http://").count();
        let names = ["http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"];
        let names_only: usize = names.iter().map(|name| text.matches(name).count()).sum();
        assert_eq!(hosts, names_only, "{} names a host", path.display());
    }
    let html = std::fs::read_to_string(ui_dir().join("index.html")).unwrap();
    let files: usize =
        ["<script src=\"ui/", "<script type=\"module\" src=\"ui/"].map(|tag| html.matches(tag).count()).iter().sum();
    assert_eq!(html.matches("<script").count(), files);
}

#[test]
fn the_web_ui_is_as_small_as_its_page_of_the_documentation_says() {
    let files = files(&ui_dir()).chain(files(&ui_dir().join("vendor")));
    let size: u64 = files.map(|path| path.metadata().unwrap().len()).sum();
    assert!(size < 250_000, "{size} bytes");
}

/// The vendored Markdown parser only parses: it neither builds elements nor sends requests.
#[test]
fn the_vendored_parser_touches_neither_the_document_nor_the_network() {
    let text = std::fs::read_to_string(ui_dir().join("vendor/marked.js")).unwrap();
    for forbidden in ["document", "innerHTML", "fetch(", "XMLHttpRequest", "eval(", "Function(", "import(", "window"] {
        assert!(!text.contains(forbidden), "marked.js holds {forbidden}");
    }
}
