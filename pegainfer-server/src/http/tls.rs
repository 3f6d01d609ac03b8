//! TLS 1.2 and 1.3, for deployments without a proxy that terminates TLS.

use super::acceptor::Protocol;
use super::secret_file;
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, version};

/// A certificate and its key, ready to accept connections. Clones share them. The files can be reloaded.
#[derive(Clone)]
pub struct Tls(Arc<Files>);

struct Files {
    cert: PathBuf,
    key: PathBuf,
    acceptors: RwLock<Acceptors>,
}

/// The acceptors of both versions of HTTP.
#[derive(Clone)]
struct Acceptors {
    http1: TlsAcceptor,
    http2: TlsAcceptor,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads PEM files: the certificate chain, the server's own certificate first, and the private key.
    pub fn load(cert: &Path, key: &Path) -> Result<Self> {
        let acceptors = RwLock::new(read(cert, key)?);
        Ok(Self(Arc::new(Files { cert: cert.to_path_buf(), key: key.to_path_buf(), acceptors })))
    }

    /// Reads the files again, for new connections; on an error the certificate stays as it is.
    pub fn reload(&self) -> Result<()> {
        let acceptors = read(&self.0.cert, &self.0.key)?;
        *self.0.acceptors.write().unwrap_or_else(PoisonError::into_inner) = acceptors;
        Ok(())
    }

    /// The acceptor that performs the handshake of new connections with this version of HTTP.
    pub(super) fn acceptor(&self, protocol: Protocol) -> TlsAcceptor {
        let acceptors = self.0.acceptors.read().unwrap_or_else(PoisonError::into_inner);
        match protocol {
            Protocol::Http1 => acceptors.http1.clone(),
            Protocol::Http2 => acceptors.http2.clone(),
        }
    }
}

fn read(cert: &Path, key: &Path) -> Result<Acceptors> {
    let unreadable = || format!("--tls-cert {} cannot be read as PEM", cert.display());
    let pem = secret_file::read(cert).with_context(unreadable)?;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().with_context(unreadable)?;
    ensure!(!chain.is_empty(), "--tls-cert {} has no certificate", cert.display());
    let unreadable = || format!("--tls-key {} cannot be read as a PEM key without password", key.display());
    let pem = secret_file::read(key).with_context(unreadable)?;
    let secret = PrivateKeyDer::from_pem_slice(&pem).with_context(unreadable)?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&version::TLS13, &version::TLS12])
        .context("TLS cannot be set up")?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .with_context(|| format!("--tls-key {} does not belong to the certificate", key.display()))?;
    let speaking = |protocol: &[u8]| {
        let mut config = config.clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        TlsAcceptor::from(Arc::new(config))
    };
    Ok(Acceptors { http1: speaking(b"http/1.1"), http2: speaking(b"h2") })
}
