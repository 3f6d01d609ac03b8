//! TLS: the API works encrypted, and a client that fails the handshake does not affect others.

use crate::support::TestServer;
use crate::support::mock::MockEngine;
use pegainfer_server::app::Options;
use pegainfer_server::http::Tls;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

fn server() -> TestServer {
    let (engine, _) = MockEngine::replying(" a cat sat on a mat");
    let tls = Some(Tls::load(&fixture("cert.pem"), &fixture("key.pem")).unwrap());
    TestServer::with(engine, Options { tls, client_timeout: Duration::from_millis(500), ..Options::default() })
}

/// A TLS connection for this protocol.
fn connect(address: SocketAddr, protocol: &str) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(fixture("cert.pem")).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.into()];
    let client = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    StreamOwned::new(client, TcpStream::connect(address).unwrap())
}

/// Sends a request over TLS and reads until the server closes the connection.
fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> String {
    let mut stream = connect(address, "http/1.1");
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut response = Vec::new();
    // Some TLS connections end abruptly. Only the text before that counts.
    let _ = stream.read_to_end(&mut response);
    String::from_utf8(response).unwrap()
}

#[test]
fn plain_and_streamed_answers_come_encrypted() {
    let server = server();
    assert!(ask(server.address, "GET", "/health", "").starts_with("HTTP/1.1 200"));
    let body = r#"{"prompt": "x", "max_tokens": 300, "ignore_eos": true, "stream": true}"#;
    let response = ask(server.address, "POST", "/v1/completions", body);
    assert_eq!(response.matches("data: {").count(), 300);
    assert!(response.contains("data: [DONE]"));
}

#[test]
fn a_client_without_tls_or_half_a_handshake_is_dropped() {
    let server = server();
    let mut plain = TcpStream::connect(server.address).unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let silent = TcpStream::connect(server.address).unwrap();
    assert!(ask(server.address, "GET", "/health", "").starts_with("HTTP/1.1 200"), "others are served meanwhile");
    for mut connection in [plain, silent] {
        connection.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let (started, mut response) = (Instant::now(), Vec::new());
        if let Err(error) = connection.read_to_end(&mut response) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "after {:?}", started.elapsed());
        }
        assert!(!response.starts_with(b"HTTP"), "responded without TLS");
    }
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let error = |cert: &str, key: &str| format!("{:#}", Tls::load(&fixture(cert), &fixture(key)).unwrap_err());
    assert!(error("missing.pem", "key.pem").contains("missing.pem cannot be read as PEM"));
    assert!(error("key.pem", "key.pem").contains("key.pem has no certificate"));
    assert!(error("cert.pem", "cert.pem").contains("cert.pem cannot be read as a PEM key without password"));
}

#[test]
fn a_certificate_is_replaced_without_a_restart() {
    let dir = std::env::temp_dir().join(format!("pegainfer-tls-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (cert, key) = (dir.join("cert.pem"), dir.join("key.pem"));
    std::fs::copy(fixture("cert.pem"), &cert).unwrap();
    std::fs::copy(fixture("key.pem"), &key).unwrap();
    let tls = Tls::load(&cert, &key).unwrap();
    let (engine, _) = MockEngine::replying(" a cat");
    let server = TestServer::with(engine, Options { tls: Some(tls.clone()), ..Options::default() });
    std::fs::write(&cert, "no certificate").unwrap();
    assert!(format!("{:#}", tls.reload().unwrap_err()).contains("cert.pem has no certificate"));
    assert!(ask(server.address, "GET", "/health", "").starts_with("HTTP/1.1 200"), "the old one is still in use");
    std::fs::copy(fixture("cert.pem"), &cert).unwrap();
    tls.reload().unwrap();
    assert!(ask(server.address, "GET", "/health", "").starts_with("HTTP/1.1 200"));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn the_port_of_grpc_speaks_http2_encrypted() {
    let server = server();
    let mut stream = connect(server.grpc, "h2");
    // The preface and empty settings.
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    let mut head = [0; 9];
    stream.read_exact(&mut head).unwrap();
    assert_eq!((head[3], stream.conn.alpn_protocol()), (4, Some(&b"h2"[..])), "the server's settings");
    let mut other = connect(server.grpc, "http/1.1");
    assert!(other.write_all(b"GET / HTTP/1.1\r\n\r\n").and_then(|()| other.read_exact(&mut head)).is_err());
}
