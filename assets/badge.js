// The badge says what the model does for as long as somebody looks: the server tells every change.
let source;
const look = () => {
  source?.close();
  if (document.hidden) return;
  source = new EventSource(`${window.gradio_config.root}/model?task=${props.task}`);
  source.onmessage = (event) => { props.value = event.data; };
  source.onerror = () => { props.value = props.gone; };
};
document.addEventListener("visibilitychange", look);
look();
