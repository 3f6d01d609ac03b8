//! Dates of certificates: clients refuse one that has expired or is not valid yet, but the server can use it.

use jiff::Timestamp;
use tokio_rustls::rustls::pki_types::CertificateDer;
use x509_cert::Certificate;
use x509_cert::der::Decode;

/// What is wrong with the dates of a chain at this time, one clause for each certificate.
pub fn problems(chain: &[CertificateDer<'_>], now: Timestamp) -> Vec<String> {
    let problem = |(at, der): (usize, &CertificateDer<'_>)| {
        let name = if chain.len() == 1 { "the certificate".into() } else { format!("certificate {}", at + 1) };
        problem(&name, der, now)
    };
    chain.iter().enumerate().filter_map(problem).collect()
}

fn problem(name: &str, der: &CertificateDer<'_>, now: Timestamp) -> Option<String> {
    let validity = match Certificate::from_der(der) {
        Ok(certificate) => certificate.tbs_certificate.validity,
        Err(error) => return Some(format!("the dates of {name} cannot be read: {error}")),
    };
    let time = |time: x509_cert::time::Time| {
        let seconds = i64::try_from(time.to_unix_duration().as_secs()).ok()?;
        Timestamp::from_second(seconds).ok()
    };
    let (begin, end) = (time(validity.not_before)?, time(validity.not_after)?);
    if now < begin {
        Some(format!(
            "{name} is not valid yet: it is valid from {begin} to {end}, and it is {now:.0}; clients refuse it"
        ))
    } else if now > end {
        Some(format!("{name} has expired: it was valid from {begin} to {end}, and it is {now:.0}; clients refuse it"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_rustls::rustls::pki_types::pem::PemObject;

    #[test]
    fn a_certificate_outside_of_its_dates_is_told() {
        let pem = include_bytes!("../../tests/fixtures/tls/cert.pem");
        let certificate = CertificateDer::from_pem_slice(pem).unwrap();
        let at = |time: &str| problems(std::slice::from_ref(&certificate), time.parse().unwrap());
        let dates = "valid from 2026-11-21T17:03:59Z to 2126-10-28T17:03:59Z";
        assert_eq!(at("2026-11-22T00:00:00Z"), [""; 0]);
        let early = at("2026-11-20T10:00:00.5Z").remove(0);
        assert!(early.starts_with(&format!("the certificate is not valid yet: it is {dates}")), "{early}");
        assert!(early.contains("it is 2026-11-20T10:00:0"), "{early}");
        let late = at("2127-01-01T00:00:00Z").remove(0);
        assert!(late.starts_with(&format!("the certificate has expired: it was {dates}")), "{late}");
        let two = [certificate.clone(), CertificateDer::from(vec![0x30, 0])];
        let problems = problems(&two, "2126-12-01T00:00:00Z".parse().unwrap());
        assert!(problems[0].starts_with("certificate 1 has expired"), "{problems:?}");
        assert!(problems[1].starts_with("the dates of certificate 2 cannot be read"), "{problems:?}");
    }
}
