//! What a owner does with what comes late (protocol rule 22).

use holdfast_base::{
    BlockData, BlockOp, BlockReply, Buf, Effects, GridId, InstanceId, Instant, Prng, RequestToken, Token,
};
use holdfast_format::forward::{Answer, Ask, Client, FORWARD, LIFETIME_MS, Op, Range, Refusal, TickMs};
use holdfast_format::versions::Versions;
use holdfast_format::wire::PAYLOAD_BYTES_MAX;
use holdfast_host::forward::{Binding, LinkId, OwnerEffect, OwnerEnd, OwnerEvent};

const GRID: GridId = GridId(7);

struct Scene {
    owner: OwnerEnd,
    now_ms: u64,
    next_token: u64,
}

impl Scene {
    fn new() -> Scene {
        Scene { owner: OwnerEnd::new(GRID, "owner"), now_ms: 5_000, next_token: 1 }
    }

    fn tell(&mut self, event: OwnerEvent) -> Vec<OwnerEffect> {
        let mut out = Effects::new();
        self.owner.handle(Instant(self.now_ms * 1_000_000), event, &mut out);
        out.take()
    }

    fn ask(&mut self, link: u64, ask: Ask) -> Vec<OwnerEffect> {
        let token = self.next_token;
        self.next_token += 1;
        let payload = match &ask {
            Ask::Op { op: Op::Write { .. }, .. } => Buf::copy_from(&[7; 512]),
            _ => Buf::empty(),
        };
        self.tell(OwnerEvent::Ask { link: LinkId(link), token, ask, payload })
    }

    fn hello(&mut self, link: u64, host: &str, number: u64) -> Vec<OwnerEffect> {
        let (versions, grid, instance) = (FORWARD, GRID, InstanceId(1));
        self.ask(link, Ask::Hello { versions, grid, host: host.to_string(), instance, number })
    }

    /// Greets, and attaches session 1.
    fn attach(&mut self, link: u64, host: &str, number: u64, fresh: bool) {
        let greeted = self.hello(link, host, number);
        assert!(matches!(answers(&greeted)[..], [Answer::Hello { .. }]), "{greeted:?}");
        let attached = self.bind(link, fresh);
        assert_eq!(answers(&attached), [Answer::Attached]);
    }

    fn bind(&mut self, link: u64, fresh: bool) -> Vec<OwnerEffect> {
        let mut effects = self.ask(link, Ask::Attach { session: 1, export: "vm".to_string(), fresh });
        let remote = effects.iter().find_map(|e| match e {
            OwnerEffect::Bind { remote, .. } => Some(*remote),
            _ => None,
        });
        let remote = remote.expect("the export is looked for");
        effects.extend(self.tell(OwnerEvent::Bound { remote, binding: Binding::Bound }));
        effects
    }

    fn write(&mut self, link: u64, tick: TickMs) -> Vec<OwnerEffect> {
        let crc = holdfast_base::crc32c(&[7; 512]);
        self.ask(link, Ask::Op { session: 1, tick, op: Op::Write { offset: 0, crc } })
    }

    fn done(&mut self, (request, token): (Token, RequestToken)) -> Vec<OwnerEffect> {
        let reply = BlockReply { token, result: Ok(BlockData::Done) };
        self.tell(OwnerEvent::Reply { request, reply })
    }
}

fn answers(effects: &[OwnerEffect]) -> Vec<Answer> {
    let answers = effects.iter().filter_map(|e| match e {
        OwnerEffect::Answer { answer, .. } => Some(answer.clone()),
        _ => None,
    });
    answers.collect()
}

fn submitted(effects: &[OwnerEffect]) -> Option<(Token, RequestToken)> {
    effects.iter().find_map(|e| match e {
        OwnerEffect::Submit { request, block, .. } => {
            assert!(matches!(block.op, BlockOp::Write { .. }));
            Some((*request, block.token))
        }
        _ => None,
    })
}

#[test]
fn what_is_older_than_its_lifetime_is_not_carried_out() {
    let mut scene = Scene::new();
    scene.attach(1, "ingress", 1, false);
    let tick = scene.now_ms;
    scene.now_ms += LIFETIME_MS;
    assert!(submitted(&scene.write(1, tick)).is_some(), "as old as it may get");
    scene.now_ms += 1;
    let late = scene.write(1, tick);
    assert_eq!(submitted(&late), None);
    assert_eq!(answers(&late), [Answer::Stale { tick: scene.now_ms }], "with a tick to ask again by");
}

#[test]
fn an_ingress_is_greeted_anew_when_nothing_of_its_last_link_is_under_way() {
    let mut scene = Scene::new();
    scene.attach(1, "ingress", 1, false);
    let tick = scene.now_ms;
    let request = submitted(&scene.write(1, tick)).expect("it is carried out");
    let greeted = scene.hello(2, "ingress", 2);
    assert!(greeted.iter().any(|e| matches!(e, OwnerEffect::CloseLink { link: LinkId(1) })), "{greeted:?}");
    assert_eq!(answers(&greeted), [], "the write may still land");
    assert!(submitted(&scene.write(1, tick)).is_none(), "nothing is read of the old link any more");
    let done = scene.done(request);
    assert!(matches!(answers(&done)[..], [Answer::Hello { .. }]), "{done:?}");
    let superseded = scene.hello(3, "ingress", 1);
    assert_eq!(answers(&superseded), [Answer::Refused(Refusal::Superseded)], "an older connection that comes late");
}

#[test]
fn a_session_is_detached_and_attached_anew_when_nothing_of_it_is_under_way() {
    let mut scene = Scene::new();
    scene.attach(1, "ingress", 1, false);
    let tick = scene.now_ms;
    let request = submitted(&scene.write(1, tick)).expect("it is carried out");
    assert_eq!(answers(&scene.ask(1, Ask::Detach { session: 1 })), []);
    assert_eq!(answers(&scene.bind(1, false)), [], "its number is the same");
    let done = scene.done(request);
    assert_eq!(answers(&done), [Answer::Detached, Answer::Attached]);
}

#[test]
fn a_fresh_session_begins_when_other_ingresses_have_passed_on_what_they_had() {
    let mut scene = Scene::new();
    scene.attach(1, "one", 1, false);
    scene.hello(2, "two", 1);
    let fresh = scene.bind(2, true);
    let [Answer::Barrier { barrier }] = answers(&fresh)[..] else { panic!("{fresh:?}") };
    assert!(submitted(&scene.write(2, 5_000)).is_none(), "not begun");
    let passed = scene.ask(1, Ask::Passed { barrier });
    assert_eq!(answers(&passed), [Answer::Attached]);

    // One that never says so: what it had is too old by then.
    scene.owner = OwnerEnd::new(GRID, "owner");
    scene.attach(3, "one", 1, false);
    scene.hello(4, "two", 1);
    scene.bind(4, true);
    scene.now_ms = scene.owner.next_deadline().expect("a bound").0 / 1_000_000;
    assert!(scene.now_ms >= 5_000 + LIFETIME_MS);
    assert_eq!(answers(&scene.tell(OwnerEvent::Tick)), [Answer::Attached]);

    // One that is gone: nothing of it is read any more.
    let own = Token(99);
    let mut effects = scene.tell(OwnerEvent::Arrive { session: own });
    effects.extend(scene.tell(OwnerEvent::LinkDown { link: LinkId(3) }));
    effects.extend(scene.tell(OwnerEvent::LinkDown { link: LinkId(4) }));
    assert!(effects.iter().any(|e| matches!(e, OwnerEffect::Admit { session } if *session == own)), "{effects:?}");
}

#[test]
fn a_stranger_is_refused() {
    let mut scene = Scene::new();
    let (host, instance) = ("ingress".to_string(), InstanceId(1));
    let other_grid = Ask::Hello { versions: FORWARD, grid: GridId(8), host: host.clone(), instance, number: 1 };
    assert_eq!(answers(&scene.ask(1, other_grid)), [Answer::Refused(Refusal::Grid)]);
    let versions = Versions { oldest: FORWARD.newest + 1, newest: FORWARD.newest + 2 };
    let other_version = Ask::Hello { versions, grid: GRID, host, instance, number: 1 };
    assert_eq!(answers(&scene.ask(2, other_version)), [Answer::Refused(Refusal::Version(FORWARD))]);
    let unasked = scene.ask(3, Ask::Ping);
    assert!(matches!(unasked[..], [OwnerEffect::CloseLink { link: LinkId(3) }]), "before its greeting: {unasked:?}");
}

/// An ingress that behaves, beside those that don't: what of it is under way, and who waits to be bound.
struct Crowd {
    scene: Scene,
    /// Of the one that behaves; it takes a new one when that is closed.
    link: u64,
    under_way: Vec<(Token, RequestToken)>,
    waiting: Vec<Token>,
    submitted_count: usize,
}

impl Crowd {
    fn greet(&mut self) {
        // What it had is done first: its greeting waits for that.
        while let Some(request) = self.under_way.pop() {
            let effects = self.scene.done(request);
            self.note(&effects);
        }
        self.link += 1;
        let effects = self.scene.hello(self.link, "good", self.link);
        self.note(&effects);
        let effects = self.scene.ask(self.link, Ask::Attach { session: 1, export: "vm".to_string(), fresh: false });
        self.note(&effects);
        self.bind_all();
    }

    fn bind_all(&mut self) {
        while let Some(remote) = self.waiting.pop() {
            let effects = self.scene.tell(OwnerEvent::Bound { remote, binding: Binding::Bound });
            self.note(&effects);
        }
    }

    fn note(&mut self, effects: &[OwnerEffect]) {
        for effect in effects {
            match effect {
                OwnerEffect::Submit { request, block, .. } => {
                    self.submitted_count += 1;
                    self.under_way.push((*request, block.token));
                }
                OwnerEffect::Bind { remote, .. } => self.waiting.push(*remote),
                _ => {}
            }
        }
    }

    /// What is asked is carried out only where that is due.
    fn ask(&mut self, link: u64, ask: Ask) {
        let effects = self.scene.ask(link, ask.clone());
        for effect in &effects {
            let OwnerEffect::Submit { block, .. } = effect else { continue };
            let Ask::Op { tick, .. } = ask else { panic!("{ask:?} submits") };
            assert!(self.scene.now_ms.saturating_sub(tick) <= LIFETIME_MS, "{ask:?} is too old");
            if let BlockOp::Read(range) = &block.op {
                assert!(range.len <= u64::from(PAYLOAD_BYTES_MAX), "{ask:?} is too large");
            }
        }
        self.note(&effects);
        if effects.iter().any(|e| matches!(e, OwnerEffect::CloseLink { link } if link.0 == self.link)) {
            self.greet();
        }
    }
}

/// Whatever hosts say, and however often they say it again: nothing is carried out of a link that was not greeted, nor of a
/// tick that is too old, nor what is larger than an answer may be; and the owner stands.
#[test]
fn hosts_that_say_anything_get_nothing_carried_out_that_is_not_due() {
    let mut submitted_count = 0;
    for seed in 0..1_000 {
        let mut random = Prng::new(seed);
        let (scene, waiting) = (Scene::new(), Vec::new());
        let mut crowd = Crowd { scene, link: 1_000, under_way: Vec::new(), waiting, submitted_count: 0 };
        let mut said: Vec<Ask> = Vec::new();
        crowd.greet();
        for _ in 0..200 {
            crowd.scene.now_ms += random.below(2_000);
            let link = if random.chance(700) { crowd.link } else { random.between(1, 4) };
            match random.below(12) {
                0 => {
                    let effects = crowd.scene.tell(OwnerEvent::LinkDown { link: LinkId(link) });
                    crowd.note(&effects);
                    if link == crowd.link {
                        crowd.greet();
                    }
                }
                1 => {
                    let effects = crowd.scene.tell(OwnerEvent::Tick);
                    crowd.note(&effects);
                }
                2 | 3 if !crowd.under_way.is_empty() => {
                    let at = random.below(crowd.under_way.len() as u64) as usize;
                    let request = crowd.under_way.swap_remove(at);
                    let effects = crowd.scene.done(request);
                    crowd.note(&effects);
                }
                4 => crowd.bind_all(),
                // A replay, perhaps over another link.
                5 if !said.is_empty() => crowd.ask(link, random.pick(&said).clone()),
                _ => {
                    let ask = any_ask(&mut random, crowd.scene.now_ms);
                    said.push(ask.clone());
                    crowd.ask(link, ask);
                }
            }
        }
        submitted_count += crowd.submitted_count;
    }
    assert!(submitted_count > 1_000, "only {submitted_count} requests got so far");
}

fn any_ask(random: &mut Prng, now_ms: u64) -> Ask {
    let grid = if random.chance(900) { GRID } else { GridId(8) };
    let versions = match random.chance(900) {
        true => FORWARD,
        false => Versions { oldest: random.below(9) as u32, newest: random.below(9) as u32 },
    };
    let range = Range { offset: random.next_u64() >> random.below(64), len: random.next_u64() >> random.below(64) };
    let ops = [
        Op::Read(range),
        Op::Write { offset: range.offset, crc: random.below(2) as u32 },
        Op::Write { offset: range.offset, crc: holdfast_base::crc32c(&[7; 512]) },
        Op::Flush,
        Op::Discard(range),
        Op::Status(range),
    ];
    let session = random.below(3);
    match random.below(8) {
        0 | 1 => Ask::Hello {
            versions,
            grid,
            host: (*random.pick(&["a", "b", ""])).to_string(),
            instance: InstanceId(u128::from(random.below(2))),
            number: random.below(6),
        },
        2 if random.chance(500) => {
            let client = Client { label: "c".to_string(), process: Some(random.below(3) as u32), ..Client::default() };
            let wrote_ms = random.chance(500).then(|| random.next_u64());
            Ask::AttachAs {
                session,
                export: "vm".to_string(),
                fresh: random.chance(500),
                client,
                wrote_ms,
                fenced: false,
            }
        }
        2 => Ask::Attach { session, export: "vm".to_string(), fresh: random.chance(500) },
        3 => Ask::Detach { session },
        4 => Ask::Passed { barrier: random.below(4) },
        5 => Ask::Ping,
        _ => Ask::Op {
            session,
            tick: (now_ms + random.below(3_000)).saturating_sub(random.below(20_000)),
            op: *random.pick(&ops),
        },
    }
}
