//! A repository in a bucket of a store that speaks S3.
//!
//! Requests are signed by `rusty-s3` (AWS Signature Version 4, in the query), with what the environment has:
//! `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`. Bucket names stand in the path.
//!
//! Faults: what a store calls its own trouble (5xx, 429), or does not answer, is asked again a few times; each request
//! can be. `put_new` that is asked again may find its own object, and says then that there is one.

use crate::store::{Listed, OBJECT_BYTES_MAX, Store};
use crate::{Error, Result};
use rusty_s3::actions::ListObjectsV2;
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use std::env;
use std::time::Duration;
use ureq::Agent;
use ureq::http::Response;
use ureq::tls::{RootCerts, TlsConfig};

const SIGNED_FOR: Duration = Duration::from_secs(900);

/// Of one request, whole.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(120);

const ATTEMPTS_MAX: u32 = 5;

/// Before the second attempt; then twice as long each time.
const PAUSE: Duration = Duration::from_millis(250);

/// Requests of a backup's workers, and of what looks after its lock.
const CONNECTIONS_MAX: usize = 16;

/// Of a page of a listing.
const LISTING_BYTES_MAX: u64 = 16 << 20;

const CONFLICT: u16 = 409;
const PRECONDITION_FAILED: u16 = 412;
const NOT_FOUND: u16 = 404;
const TOO_MANY: u16 = 429;

pub struct S3 {
    bucket: Bucket,
    credentials: Credentials,
    /// With a slash at its end, or empty.
    prefix: String,
    agent: Agent,
}

impl S3 {
    /// `https://HOST[:PORT]/BUCKET[/PREFIX]`.
    ///
    /// # Errors
    /// It is no such place, or the environment has no credentials. Nothing is asked for yet.
    pub fn open(url: &str) -> Result<S3> {
        let wrong = || {
            Error::Invalid(format!("`s3:{url}` is no place for backups: write s3:https://HOST[:PORT]/BUCKET[/PREFIX]"))
        };
        let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
        if !matches!(scheme, "https" | "http") {
            return Err(wrong());
        }
        let mut parts = rest.trim_end_matches('/').splitn(3, '/');
        let (host, bucket) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        if host.is_empty() || bucket.is_empty() {
            return Err(wrong());
        }
        let prefix = parts.next().map(|prefix| format!("{prefix}/")).unwrap_or_default();
        let endpoint = format!("{scheme}://{host}").parse().map_err(|_| wrong())?;
        let region = ["AWS_REGION", "AWS_DEFAULT_REGION"].iter().find_map(|name| env::var(name).ok());
        let region = region.unwrap_or_else(|| "us-east-1".to_string());
        let bucket = Bucket::new(endpoint, UrlStyle::Path, bucket.to_string(), region).map_err(|_| wrong())?;
        let credentials = Credentials::from_env().ok_or_else(|| {
            Error::Invalid(
                "an S3 store is asked with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the environment; set both"
                    .to_string(),
            )
        })?;
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_idle_connections_per_host(CONNECTIONS_MAX)
            .max_idle_connections(CONNECTIONS_MAX)
            .timeout_global(Some(ANSWER_TIME_MAX))
            .build();
        Ok(S3 { bucket, credentials, prefix, agent: agent.into() })
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The status of an answer that makes sense, and its body.
    fn ask(
        &self,
        what: &str,
        fine: &[u16],
        body_max: u64,
        send: impl Fn() -> std::result::Result<Response<ureq::Body>, ureq::Error>,
    ) -> Result<Answer> {
        let mut pause = PAUSE;
        let mut attempt = 1;
        loop {
            let told = send().and_then(|answer| Answer::of(answer, body_max));
            let why = match told {
                Ok(answer) if answer.is_success() || fine.contains(&answer.status) => return Ok(answer),
                Ok(answer) if answer.status < 500 && answer.status != TOO_MANY => {
                    return Err(Error::store(format_args!("the S3 store did not {what}"), answer.why()));
                }
                Ok(answer) => answer.why(),
                Err(why) => why.to_string(),
            };
            if attempt == ATTEMPTS_MAX {
                return Err(Error::store(format_args!("the S3 store did not {what}, {ATTEMPTS_MAX} times"), why));
            }
            std::thread::sleep(pause);
            (pause, attempt) = (pause * 2, attempt + 1);
        }
    }

    fn send(&self, name: &str, bytes: &[u8], is_new: bool) -> Result<bool> {
        let key = self.key(name);
        let fine: &[u16] = if is_new { &[CONFLICT, PRECONDITION_FAILED] } else { &[] };
        let answer = self.ask(&format!("take {key}"), fine, LISTING_BYTES_MAX, || {
            let mut action = self.bucket.put_object(Some(&self.credentials), &key);
            if is_new {
                action.headers_mut().insert("if-none-match", "*");
            }
            let request = self.agent.put(action.sign(SIGNED_FOR).as_str());
            if is_new { request.header("If-None-Match", "*") } else { request }.send(bytes)
        })?;
        Ok(answer.is_success())
    }
}

struct Answer {
    status: u16,
    body: Vec<u8>,
    bytes: Option<u64>,
    written: Option<String>,
}

impl Answer {
    fn of(mut answer: Response<ureq::Body>, body_max: u64) -> std::result::Result<Answer, ureq::Error> {
        let text = |name| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_string);
        let (bytes, written) = (text("content-length").and_then(|text| text.parse().ok()), text("last-modified"));
        let body = answer.body_mut().with_config().limit(body_max).read_to_vec()?;
        Ok(Answer { status: answer.status().as_u16(), body, bytes, written })
    }

    fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Of the store's own words their beginning.
    fn why(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        let part = |tag: &str| {
            let from = text.split_once(&format!("<{tag}>"))?.1;
            from.split_once(&format!("</{tag}>")).map(|(inner, _)| inner.chars().take(200).collect::<String>())
        };
        let told: Vec<String> = ["Code", "Message"].iter().filter_map(|tag| part(tag)).collect();
        if told.is_empty() {
            format!("status {}", self.status)
        } else {
            format!("{} ({})", told.join(": "), self.status)
        }
    }
}

fn ms_of(text: Option<&str>, parse: impl Fn(&str) -> Option<jiff::Timestamp>) -> Result<u64> {
    let found = text.and_then(parse).and_then(|at| u64::try_from(at.as_millisecond()).ok());
    found.ok_or_else(|| Error::Store(format!("the S3 store says no time when an object was written, but {text:?}")))
}

impl Store for S3 {
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.send(name, bytes, false).map(drop)
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        self.send(name, bytes, true)
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let key = self.key(name);
        let answer = self.ask(&format!("give {key}"), &[NOT_FOUND], OBJECT_BYTES_MAX, || {
            self.agent.get(self.bucket.get_object(Some(&self.credentials), &key).sign(SIGNED_FOR).as_str()).call()
        })?;
        // A bucket that is not there is no object that is not there.
        match answer.is_success() {
            true => Ok(Some(answer.body)),
            false if answer.why().starts_with("NoSuchBucket") => {
                let bucket = self.bucket.name();
                Err(Error::NotFound(format!(
                    "there is no bucket {bucket}; make it first, in the store: {}",
                    answer.why()
                )))
            }
            false => Ok(None),
        }
    }

    fn stat(&self, name: &str) -> Result<Option<Listed>> {
        let key = self.key(name);
        let answer = self.ask(&format!("tell of {key}"), &[NOT_FOUND], 0, || {
            self.agent.head(self.bucket.head_object(Some(&self.credentials), &key).sign(SIGNED_FOR).as_str()).call()
        })?;
        if !answer.is_success() {
            return Ok(None);
        }
        let rfc2822 = |text: &str| Some(jiff::fmt::rfc2822::parse(text).ok()?.timestamp());
        let written_ms = ms_of(answer.written.as_deref(), rfc2822)?;
        Ok(Some(Listed { name: name.to_string(), bytes: answer.bytes.unwrap_or(0), written_ms }))
    }

    fn list(&self, folder: &str) -> Result<Vec<Listed>> {
        let prefix = self.key(&format!("{folder}/"));
        let mut found = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let answer = self.ask(&format!("list {prefix}"), &[], LISTING_BYTES_MAX, || {
                let mut action = self.bucket.list_objects_v2(Some(&self.credentials));
                action.with_prefix(prefix.as_str());
                if let Some(token) = &next {
                    action.with_continuation_token(token.as_str());
                }
                self.agent.get(action.sign(SIGNED_FOR).as_str()).call()
            })?;
            let page = ListObjectsV2::parse_response(&String::from_utf8_lossy(&answer.body))
                .map_err(|why| Error::store("the S3 store's listing makes no sense", why))?;
            for object in page.contents {
                let Some(name) = object.key.strip_prefix(&self.prefix) else { continue };
                let written_ms = ms_of(object.last_modified.as_deref(), |text| text.parse().ok())?;
                found.push(Listed { name: name.to_string(), bytes: object.size.unwrap_or(0), written_ms });
            }
            match page.next_continuation_token {
                Some(token) => next = Some(token),
                None => return Ok(found),
            }
        }
    }

    fn delete(&self, name: &str) -> Result<()> {
        let key = self.key(name);
        let asked = self.ask(&format!("delete {key}"), &[NOT_FOUND], LISTING_BYTES_MAX, || {
            self.agent.delete(self.bucket.delete_object(Some(&self.credentials), &key).sign(SIGNED_FOR).as_str()).call()
        });
        asked.map(drop)
    }

    fn sweep(&self, _: &str) -> Result<()> {
        Ok(())
    }

    fn check_vacant(&self) -> Result<()> {
        // Chunks that nobody knows would be deleted by the first who prunes.
        match self.list("chunks")?.first() {
            None => Ok(()),
            Some(found) => Err(Error::Invalid(format!(
                "there is something already ({}), and no repository; take another prefix",
                self.key(&found.name)
            ))),
        }
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_or_refused_with_what_to_write() {
        for odd in ["bucket", "ftp://host/bucket", "https://host", "https:///bucket", "https://host/"] {
            let why = S3::open(odd).err().expect("refused").to_string();
            assert!(why.contains("s3:https://HOST[:PORT]/BUCKET"), "{odd}: {why}");
        }
    }

    #[test]
    fn a_refusal_tells_in_the_words_of_the_store() {
        let body = b"<?xml?><Error><Code>AccessDenied</Code><Message>not yours</Message></Error>".to_vec();
        let answer = Answer { status: 403, body, bytes: None, written: None };
        assert_eq!(answer.why(), "AccessDenied: not yours (403)");
        assert_eq!(Answer { status: 502, body: b"<html>".to_vec(), bytes: None, written: None }.why(), "status 502");
    }
}
