//! How alerts are told: to a webhook, and by mail.
//!
//! A webhook gets one POST for each, of an object with `grid`, `host`, `became` (`raised`, `cleared`, `test`), `severity`,
//! `concern`, `about`, `what`, `next`, and `text`, which is all of that as a sentence: chats that take incoming webhooks
//! show it. Mail has all that is to be told at a time in one message.
//!
//! What could not be told is kept, [`WAITING_MAX`] at most, and tried again: nothing of it is told twice by one way.

use anyhow::{Context, Result, ensure};
use holdfast_api::{AlertArrival, AlertTrouble, Concern, Finding, Severity};
use holdfast_base::Instant;
use holdfast_verdict::alerts::{Alert, Became};
use lettre::message::{Mailbox, header};
use lettre::transport::smtp::authentication::Credentials;
use lettre::{Message, SmtpTransport, Transport};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig};

/// Of one way; of more the oldest are dropped.
const WAITING_MAX: usize = 100;

/// Of one attempt.
const SEND_WITHIN: Duration = Duration::from_secs(15);

/// Pauses after attempts that failed: doubled each time.
const PAUSE_MIN: Duration = Duration::from_secs(10);
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// Where alerts go.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Targets {
    pub webhook: Option<String>,
    /// `smtps://USER@SERVER:PORT`, or `smtp://…?tls=required`.
    pub smtp: Option<String>,
    pub smtp_password_file: Option<PathBuf>,
    pub mail_from: Option<String>,
    /// With commas between them.
    pub mail_to: Option<String>,
}

/// Who tells.
#[derive(Clone, Debug)]
pub struct Sender {
    pub grid: String,
    pub host: String,
}

enum Way {
    Webhook { url: String, agent: Agent },
    Mail { targets: Targets },
}

struct Queue {
    way: Way,
    waiting: VecDeque<Alert>,
    dropped: u64,
    pause: Duration,
    due: Instant,
    /// Why the last attempt failed.
    trouble: Option<String>,
}

/// All ways that are set.
pub struct Ways {
    sender: Sender,
    queues: Vec<Queue>,
}

/// What a test tells.
pub fn test_alert() -> Alert {
    let finding = Finding {
        severity: Severity::Warning,
        concern: Concern::Service,
        about: "test".to_string(),
        what: "this is a test: nothing is wrong".to_string(),
        next: None,
        announced: false,
    };
    Alert { became: Became::Test, finding }
}

impl Targets {
    pub fn is_any(&self) -> bool {
        self.webhook.is_some() || self.smtp.is_some()
    }

    fn ways(&self) -> Vec<Way> {
        let webhook = self.webhook.clone().map(|url| Way::Webhook { url, agent: agent() });
        let mail = self.smtp.is_some().then(|| Way::Mail { targets: self.clone() });
        webhook.into_iter().chain(mail).collect()
    }

    /// Sends a test by each way, and says what became of it.
    pub fn test(&self, sender: &Sender) -> Vec<AlertArrival> {
        let test = |way: Way| {
            let sent = way.send(sender, &[test_alert()], 0);
            AlertArrival { way: way.name(), trouble: sent.err().map(|error| format!("{error:#}")) }
        };
        self.ways().into_iter().map(test).collect()
    }
}

impl Ways {
    pub fn new(targets: &Targets, sender: Sender) -> Ways {
        let queue = |way| Queue {
            way,
            waiting: VecDeque::new(),
            dropped: 0,
            pause: PAUSE_MIN,
            due: Instant::ZERO,
            trouble: None,
        };
        Ways { sender, queues: targets.ways().into_iter().map(queue).collect() }
    }

    pub fn add(&mut self, alerts: &[Alert]) {
        for queue in &mut self.queues {
            queue.waiting.extend(alerts.iter().cloned());
            let above = queue.waiting.len().saturating_sub(WAITING_MAX);
            queue.waiting.drain(..above);
            queue.dropped += above as u64;
        }
    }

    /// Tells what waits, by each way that is due; what failed, and why.
    pub fn send(&mut self, now: Instant) -> Vec<String> {
        let sender = &self.sender;
        let failed =
            self.queues.iter_mut().filter_map(|queue| Some((queue.send(sender, now).err()?, queue.way.name())));
        failed.map(|(error, way)| format!("an alert could not be sent by {way}: {error:#}")).collect()
    }

    /// Ways of which the last attempt failed.
    pub fn troubles(&self) -> Vec<AlertTrouble> {
        let trouble = |queue: &Queue| {
            let (waiting, dropped) = (queue.waiting.len() as u64, queue.dropped);
            Some(AlertTrouble { way: queue.way.name(), why: queue.trouble.clone()?, waiting, dropped })
        };
        self.queues.iter().filter_map(trouble).collect()
    }
}

impl Queue {
    fn send(&mut self, sender: &Sender, now: Instant) -> Result<()> {
        while !self.waiting.is_empty() && now >= self.due {
            let count = if matches!(self.way, Way::Mail { .. }) { self.waiting.len() } else { 1 };
            let sent = self.way.send(sender, &self.waiting.make_contiguous()[..count], self.dropped);
            self.trouble = sent.as_ref().err().map(|error| format!("{error:#}"));
            if let Err(error) = sent {
                self.due = now + self.pause;
                self.pause = (self.pause * 2).min(PAUSE_MAX);
                return Err(error);
            }
            self.waiting.drain(..count);
            (self.dropped, self.pause) = (0, PAUSE_MIN);
        }
        Ok(())
    }
}

fn agent() -> Agent {
    let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
    let config = Agent::config_builder().timeout_global(Some(SEND_WITHIN)).tls_config(tls);
    // A webhook is where it was said to be.
    config.max_redirects(0).build().into()
}

impl Way {
    fn name(&self) -> String {
        match self {
            // What stands behind the machine's name in such an address is a secret, mostly.
            Way::Webhook { url, .. } => format!("webhook at {}", server_of(url)),
            Way::Mail { targets } => format!("mail by {}", server_of(targets.smtp.as_deref().unwrap_or_default())),
        }
    }

    fn send(&self, sender: &Sender, alerts: &[Alert], dropped: u64) -> Result<()> {
        match self {
            Way::Webhook { url, agent } => alerts.iter().try_for_each(|alert| {
                let body = body(sender, alert).to_string();
                let answer = agent.post(url).header("Content-Type", "application/json").send(body)?;
                // One that says where else to go has taken nothing.
                let status = answer.status();
                ensure!(
                    status.is_success(),
                    "it answers {status}: set alerts.webhook to the address that takes alerts"
                );
                Ok(())
            }),
            Way::Mail { targets } => mail(targets, sender, alerts, dropped),
        }
    }
}

/// The machine, of an address with a scheme, a user and a path.
fn server_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let server = rest.split(['/', '?', '#']).next().unwrap_or_default();
    server.rsplit_once('@').map_or(server, |(_, server)| server)
}

fn text(sender: &Sender, alert: &Alert) -> String {
    let finding = &alert.finding;
    match alert.became {
        Became::Raised => format!("{finding} (told by host {})", sender.host),
        Became::Cleared => format!("OVER ({}): {} (told by host {})", finding.concern, finding.what, sender.host),
        Became::Test => format!("TEST: {} (told by host {})", finding.what, sender.host),
    }
}

fn body(sender: &Sender, alert: &Alert) -> serde_json::Value {
    let mut body = serde_json::to_value(&alert.finding).expect("our answers always encode");
    body["grid"] = sender.grid.clone().into();
    body["host"] = sender.host.clone().into();
    body["became"] = serde_json::to_value(alert.became).expect("our answers always encode");
    body["text"] = text(sender, alert).into();
    body
}

fn mail(targets: &Targets, sender: &Sender, alerts: &[Alert], dropped: u64) -> Result<()> {
    let mailbox = |text: &str| text.trim().parse::<Mailbox>().with_context(|| format!("`{text}` is no mail address"));
    let first = alerts.first().context("nothing is to be told")?;
    let more = if alerts.len() > 1 { format!(" and {} more", alerts.len() - 1) } else { String::new() };
    let mut message = Message::builder()
        .from(mailbox(targets.mail_from.as_deref().context("alerts.mail_from is not set")?)?)
        .subject(format!("[holdfast {}] {}{more}", sender.host, text(sender, first).lines().next().unwrap_or_default()))
        .header(header::ContentType::TEXT_PLAIN);
    for to in targets.mail_to.as_deref().context("alerts.mail_to is not set")?.split(',') {
        message = message.to(mailbox(to)?);
    }
    let mut lines: Vec<String> = alerts.iter().map(|alert| text(sender, alert)).collect();
    if dropped > 0 {
        lines.push(format!("{dropped} older ones were dropped: they could not be sent"));
    }
    let message = message.body(format!("grid {}\r\n\r\n{}\r\n", sender.grid, lines.join("\r\n")))?;
    transport(targets)?.send(&message)?;
    Ok(())
}

fn transport(targets: &Targets) -> Result<SmtpTransport> {
    let url = targets.smtp.as_deref().context("alerts.smtp is not set")?;
    let mut transport = SmtpTransport::from_url(url)?.timeout(Some(SEND_WITHIN));
    if let Some(path) = &targets.smtp_password_file {
        let password = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (_, rest) = url.split_once("://").context("alerts.smtp has no scheme")?;
        let user = rest.rsplit_once('@').map(|(user, _)| user).context("alerts.smtp names no user for the password")?;
        transport = transport.credentials(Credentials::new(user.to_string(), password.trim_end().to_string()));
    }
    Ok(transport.build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_address_only_the_server_is_told() {
        for (url, server) in [
            ("https://hooks.example/T0/SECRET", "hooks.example"),
            ("smtps://ann@mail.example:465", "mail.example:465"),
            ("smtp://ann@example@mail.example:587?tls=required", "mail.example:587"),
        ] {
            assert_eq!(server_of(url), server);
        }
    }

    #[test]
    fn what_waits_too_long_is_dropped_and_counted() {
        let targets = Targets { webhook: Some("http://127.0.0.1:9/".to_string()), ..Targets::default() };
        let mut ways = Ways::new(&targets, Sender { grid: "g".to_string(), host: "a".to_string() });
        ways.add(&vec![test_alert(); WAITING_MAX + 3]);
        assert_eq!((ways.queues[0].waiting.len(), ways.queues[0].dropped), (WAITING_MAX, 3));
        let body = body(&ways.sender, &test_alert());
        assert_eq!((body["became"].as_str(), body["severity"].as_str()), (Some("test"), Some("warning")));
        assert!(body["text"].as_str().unwrap().starts_with("TEST: "), "{body}");
    }

    #[test]
    fn what_can_not_be_sent_is_known_until_it_is() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let targets = Targets { webhook: Some(format!("http://{address}/secret")), ..Targets::default() };
        let mut ways = Ways::new(&targets, Sender { grid: "g".to_string(), host: "a".to_string() });
        assert!(ways.send(Instant::ZERO).is_empty() && ways.troubles().is_empty(), "nothing was tried");
        ways.add(&[test_alert(), test_alert()]);
        let failed = ways.send(Instant::ZERO);
        assert!(
            failed.len() == 1 && failed[0].starts_with("an alert could not be sent by webhook at 127"),
            "{failed:?}"
        );
        let troubles = ways.troubles();
        assert_eq!((troubles[0].way.as_str(), troubles[0].waiting), (format!("webhook at {address}").as_str(), 2));
        assert!(!format!("{troubles:?}").contains("secret"), "{troubles:?}");
        assert!(ways.send(Instant::ZERO).is_empty(), "it is not due");
        assert_eq!(ways.troubles(), troubles, "and so is nothing new");
        let listener = std::net::TcpListener::bind(address).unwrap();
        let heard = std::thread::spawn(move || {
            for status in ["302 Found\r\nLocation: /login", "200 OK", "204 No Content"] {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = std::io::Read::read(&mut stream, &mut [0; 4096]);
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                std::io::Write::write_all(&mut stream, answer.as_bytes()).unwrap();
            }
        });
        let failed = ways.send(Instant::ZERO + PAUSE_MAX);
        assert!(failed.len() == 1 && failed[0].contains("302"), "who is sent elsewhere has told nobody: {failed:?}");
        assert_eq!(ways.send(Instant::ZERO + 3 * PAUSE_MAX), Vec::<String>::new());
        heard.join().unwrap();
        assert!(ways.troubles().is_empty(), "all was sent");
    }
}
