//! Signals: SIGINT and SIGTERM drain, SIGHUP reloads keys and certificate, others are ignored.

use crate::http::{ApiKeys, Tls};
use crate::logging;
#[cfg(unix)]
use tokio::signal::unix::{SignalKind, signal};

/// Resolves on SIGINT or SIGTERM. A second signal ends the process immediately.
pub async fn stop() {
    one_signal().await;
    tokio::spawn(async {
        one_signal().await;
        log::warn!("second signal: exit without waiting");
        logging::flush();
        std::process::exit(1);
    });
}

#[cfg(unix)]
async fn one_signal() {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        log::error!("signals cannot be handled: stop the server with SIGKILL");
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

#[cfg(not(unix))]
async fn one_signal() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Ignores signals that would end the process although nothing is wrong: SIGUSR1, SIGUSR2, SIGALRM, and SIGXFSZ, which
/// a trace file at its `ulimit -f` causes. The handlers stay for the life of the process.
#[cfg(unix)]
pub fn ignore_others() {
    let too_large = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    for kind in [SignalKind::user_defined1(), SignalKind::user_defined2(), SignalKind::alarm(), too_large] {
        if let Err(error) = signal(kind) {
            log::warn!("signal {} ends the server, because it cannot be ignored: {error}", kind.as_raw_value());
        }
    }
}

/// Does nothing: other systems have no such signals.
#[cfg(not(unix))]
pub fn ignore_others() {}

/// Reloads the files of keys and certificate on each SIGHUP. Open connections continue; a file that cannot be used
/// changes nothing.
#[cfg(unix)]
pub async fn reload_on_hangup(api_keys: ApiKeys, admin_keys: ApiKeys, tls: Option<Tls>) {
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => return log::warn!("SIGHUP ends the server, because it cannot be handled: {error}"),
    };
    while hangup.recv().await.is_some() {
        for (what, result) in [
            ("API keys", api_keys.reload().map(|_| ())),
            ("admin keys", admin_keys.reload().map(|_| ())),
            ("certificate", tls.as_ref().map_or(Ok(()), Tls::reload)),
        ] {
            if let Err(error) = result {
                log::error!("SIGHUP: the {what} stay as they are: {error:#}");
            }
        }
        log::info!("SIGHUP: {api_keys:?} and {admin_keys:?} are in use");
    }
}

/// Does nothing: other systems have no SIGHUP.
#[cfg(not(unix))]
pub async fn reload_on_hangup(_: ApiKeys, _: ApiKeys, _: Option<Tls>) {}
